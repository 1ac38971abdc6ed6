"""A real Chromium, driven by its own driver, and what a test asks of a page."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
DEADLINE_S = 120.0
POLL_S = 0.02

T = TypeVar("T")


class Chromium:
    """A window of that width. dark: what the page is told of the user's wish. A context manager."""

    def __init__(self, width: int = 1440, height: int = 1000, *, dark: bool = False) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(BROWSER)
        for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        self.width = width
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        wish = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [wish]})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            error.add_note(f"the page says: {self.text('body')[-3000:]}\nthe console says: {self.console()}")
        self.driver.quit()

    def open(self, address: str) -> None:
        self.driver.get(address)
        self.until(
            "the page", lambda: self.run("return document.readyState") == "complete" and not self.all("#loading")
        )

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[str]:
        """The texts of these elements, read at one moment."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector
        )
        return found

    def text(self, selector: str) -> str:
        return " ".join(self.all(selector))

    def click(self, selector: str) -> None:
        """The first such element, as a mouse does; the page may replace it just then."""
        from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
        from selenium.webdriver.common.by import By

        def clicked() -> bool:
            try:
                self.driver.find_element(By.CSS_SELECTOR, selector).click()
            except (NoSuchElementException, StaleElementReferenceException):
                return False
            return True

        self.until(selector, clicked)

    def keys(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> str:
        """What has the focus, for people who do not see it: its label, or its text."""
        return str(
            self.run(
                "const e = document.activeElement; return e.getAttribute('aria-label') ?? e.textContent.slice(0, 80)"
            )
        )

    def until(self, what: str, reached: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
        deadline = time.monotonic() + deadline_s
        while not (value := reached()):
            assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
            time.sleep(POLL_S)  # another process: there is nothing to wait on
        return value

    def count(self, selector: str, wanted: int) -> None:
        """Until there are so many such elements."""
        self.until(f"{wanted} of {selector}", lambda: len(self.all(selector)) == wanted)

    def console(self) -> list[str]:
        """Errors and warnings since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def foreign(self) -> list[str]:
        """What the page has asked of another address."""
        found: list[str] = self.run(
            "return performance.getEntriesByType('resource').map((one) => one.name)"
            ".filter((name) => !name.startsWith(location.origin))"
        )
        return found

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def screenshot(self, name: str) -> None:
        """Where SCREENSHOTS says, for people to look at; nowhere without it."""
        if directory := os.environ.get("SCREENSHOTS"):
            Path(directory).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(directory) / f"{name}.png"))
