"""A real Chromium, and what it saw and asked for."""

import json
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,860",
)  # fmt: skip


class Browser:
    """Chromium with a fresh profile."""

    def __init__(self) -> None:
        paths = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
        missing = [name for name, path in paths.items() if path is None]
        if missing:
            pytest.fail(f"{' and '.join(missing)} not found: make browser, or install chromium and chromium-driver")
        options = webdriver.ChromeOptions()
        options.binary_location = paths["chromium"]
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        for flag in (*_FLAGS, f"--user-data-dir={self._profile.name}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, Service(paths["chromedriver"]))

    def close(self) -> None:
        self.driver.quit()
        self._profile.cleanup()

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """As the document has them, whether they are seen or not."""
        return [e.get_property("textContent") for e in self.driver.find_elements(By.CSS_SELECTOR, selector)]  # type: ignore[misc]

    def press(self, *keys: str, holding: str | None = None) -> None:
        """Type to whatever has the focus, one key held down meanwhile."""
        actions = ActionChains(self.driver)
        if holding is not None:
            actions.key_down(holding)
        actions.send_keys(*keys)
        if holding is not None:
            actions.key_up(holding)
        actions.perform()

    def focused(self) -> str:
        return self.driver.switch_to.active_element.get_attribute("id") or ""

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Until it holds, a minute at most."""
        return WebDriverWait(self.driver, 60, poll_frequency=0.02).until(lambda driver: condition())

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of all that assistive technology is told of."""
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]

    def complaints(self) -> list[str]:
        """What it has written to its console since this was asked last."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def addresses(self) -> list[str]:
        """What it has asked for since this was asked last."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
