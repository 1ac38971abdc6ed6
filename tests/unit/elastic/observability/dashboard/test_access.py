"""Who may see the page, and act on it."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from elastic.observability.dashboard.access import TOKEN_HEADER, Access, hosts_at

ACCESS = Access(hosts_at("127.0.0.1", 7171), 7171)
GOOD = {"origin": "http://127.0.0.1:7171", "x-elastic-token": ACCESS.token}


@pytest.mark.parametrize("host", ["127.0.0.1:7171", "localhost:7171"])
def test_the_page_answers_by_its_own_names(host: str) -> None:
    assert ACCESS.of_any({"host": host}) is None


@pytest.mark.parametrize("host", ["", "127.0.0.1", "127.0.0.1:80", "evil.example:7171", "127.0.0.1:7171.evil.example"])
def test_a_name_that_was_made_to_lead_here_is_no_name_of_it(host: str) -> None:
    refusal = ACCESS.of_any({"host": host})
    assert refusal is not None and refusal.status == HTTPStatus.MISDIRECTED_REQUEST


def test_ipv6_has_brackets() -> None:
    assert Access(hosts_at("::1", 80), 80).of_any({"host": "[::1]:80"}) is None


def test_only_the_key_opens() -> None:
    assert ACCESS.opens(ACCESS.key)
    assert not any(map(ACCESS.opens, ["", "é", ACCESS.key[:-1], ACCESS.session, ACCESS.token]))


def test_only_the_cookie_reads_and_that_of_another_port_does_not() -> None:
    assert ACCESS.of_reader({ACCESS.cookie: ACCESS.session}) is None
    for cookies in ({}, {ACCESS.cookie: ""}, {ACCESS.cookie: ACCESS.key}, {"elastic-dashboard-7172": ACCESS.session}):
        refusal = ACCESS.of_reader(cookies)
        assert refusal is not None and refusal.status == HTTPStatus.FORBIDDEN


@pytest.mark.parametrize(
    "changed",
    [
        {"origin": ""},
        {"origin": "null"},
        {"origin": "http://evil.example"},
        {"origin": "https://127.0.0.1:7171"},
        {"origin": "127.0.0.1:7171"},
        {"x-elastic-token": ""},
        {"x-elastic-token": ACCESS.session},
    ],
)
def test_an_action_needs_the_page_and_its_token(changed: dict[str, str]) -> None:
    assert ACCESS.of_actor(GOOD) is None
    refusal = ACCESS.of_actor({**GOOD, **changed})
    assert refusal is not None and refusal.status == HTTPStatus.FORBIDDEN


def test_secrets_differ_and_are_not_in_the_words_about_them() -> None:
    assert len({ACCESS.key, ACCESS.session, ACCESS.token}) == 3
    assert all(secret not in repr(ACCESS) for secret in (ACCESS.key, ACCESS.session, ACCESS.token))


def test_browsers_do_not_say_the_port_that_http_has_by_itself() -> None:
    access = Access(hosts_at("127.0.0.1", 80), 80)
    for host in ("127.0.0.1", "localhost", "127.0.0.1:80"):
        assert access.of_any({"host": host}) is None
        assert access.of_actor({"origin": f"http://{host}", TOKEN_HEADER: access.token}) is None
    assert access.of_any({"host": "evil.example"}) is not None
    assert Access(hosts_at("127.0.0.1", 8080), 8080).of_any({"host": "127.0.0.1"}) is not None
