"""Checkpoints on an S3-compatible server that has bad moments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import fsspec
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from tests.unit.elastic.checkpoints.test_checkpoints import settle
from tests.unit.jobs import Recorded, make_job, one_thread, set_up, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

ROOT = "s3://bucket/run/checkpoints"
Respond = Callable[..., Any]


@dataclass
class Server:
    """moto's S3; answers the next `busy` requests with 503."""

    application: Any
    busy: int = 0
    refused: int = 0

    def __call__(self, environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
        if self.busy > 0:
            self.busy -= 1
            self.refused += 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            respond("503 Slow Down", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"]
        answer: Iterable[bytes] = self.application(environ, respond)
        return answer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(DomainDispatcherApplication(create_backend_app))
    http = make_server("127.0.0.1", 0, server, threaded=True)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{http.server_port}")
    for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield server
    fsspec.filesystem("s3").clear_instance_cache()
    http.shutdown()
    thread.join()
    http.server_close()


def configure(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Series:
    for name, value in Settings(root=ROOT, job="train", job_id="feed", **settings).to_environment().items():
        monkeypatch.setenv(name, value)
    return Series(storage_at(ROOT))


def test_a_server_that_is_busy_for_a_while_gets_the_checkpoint_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_thread():
        series = configure(monkeypatch, every="4 steps")
        server.busy = 3
        quiet = train(set_up(make_job()), epochs=4, body=settle)
        assert server.refused == 3
        found, skipped = series.newest("feed")
        assert found is not None and found.name.step == 8 and skipped == []
        configure(monkeypatch, resume=str(found.name))
        session = Recorded()
        assert train(set_up(make_job(session)), epochs=4, body=settle) == quiet
        assert [record.step for record in session.records] == [8, 9, 10, 11]
        series.remove(found.name)
        assert [entry.name.step for entry in series.all()] == [4]
