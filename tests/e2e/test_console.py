"""The console in a real browser, before a real cluster that asks for keys."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster
from tests.gateway.test_recent_traces import key_ring

CHROMIUM, DRIVER = shutil.which("chromium") or "", shutil.which("chromedriver") or ""
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver on the PATH"),
]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
PHONE, DESKTOP = (390, 844), (1400, 900)
LIGHT, DARK = "rgb(244, 246, 249)", "rgb(14, 19, 26)"
HOSTS = "return [...new Set(performance.getEntriesByType('resource').map((entry) => new URL(entry.name).host))]"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    ring = key_ring(path, "acme", "admin")
    return {"file": str(path), **{name: said["authorization"].removeprefix("Bearer ") for name, said in ring.items()}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]) -> Iterator[RunningCluster]:
    options = f"--api-keys={keys['file']}", "--disaggregation=require", "--transports=tcp"
    with running_cluster(tmp_path_factory.mktemp("console"), *options) as cluster:
        yield cluster


class Browser:
    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver, self._url = driver, url

    def look(self, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> None:
        shown = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shown)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def open(self, view: str = "") -> None:
        self.driver.get(f"{self._url}/console#{view}")

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def shows(self, *words: str) -> None:
        eventually(lambda: all(word in self.text() for word in words), BOUND_S, f"{words} in the page")

    def waits(self, script: str) -> None:
        eventually(lambda: bool(self.run(f"return {script}")), BOUND_S, script)

    def type(self, selector: str, *keys: str) -> None:
        self.driver.find_element("css selector", selector).send_keys(*keys)

    def enter(self, key: str) -> None:
        """From anew, with this key."""
        self.open()
        self.run("sessionStorage.clear()")
        self.driver.refresh()
        self.waits("document.querySelector('#key')")
        self.type("#key", key, Keys.ENTER)

    def problems(self) -> list[str]:
        """Errors on its console, but for the 401 that asks for a key."""
        told = (entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE"))
        return [message for message in told if "401" not in message]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver: webdriver.Chrome, cluster: RunningCluster) -> Iterator[Browser]:
    """Nothing but the gateway was asked, and nothing of the page failed, in any of these tests."""
    browser = Browser(driver, cluster.http)
    browser.look()
    yield browser
    assert browser.run(HOSTS) == [cluster.http.removeprefix("http://")]
    assert browser.problems() == []


def test_a_key_opens_it_and_another_shows_its_own_tenant_alone(browser: Browser, keys: dict[str, str]) -> None:
    browser.enter("tk-00000000-wrong")
    browser.shows("the API key is not valid")
    browser.enter(keys["admin"])
    browser.shows("ready", "Between tokens", "Queue, by class and tenant")
    browser.enter(keys["acme"])
    browser.shows("tenant acme", "need a key with manages_models")
    browser.open("workers")
    browser.shows("Workers are shown to keys with manages_models")
    assert "decode-0" not in browser.text()


def test_a_chat_is_streamed_and_its_waterfall_shows_every_phase(browser: Browser, keys: dict[str, str]) -> None:
    browser.enter(keys["admin"])
    browser.shows("ready")
    browser.open("playground")
    browser.waits("document.querySelector('select option')")
    browser.type("[name=max_tokens]", "24")
    browser.type("[name=temperature]", "0")
    browser.type(".chat textarea", "add two numbers " * 40, Keys.CONTROL, Keys.ENTER)
    browser.shows("remote path", "24 tokens")
    assert browser.run("return document.querySelector('.turn.assistant p').textContent.length") > 20
    browser.run("document.querySelector('.chat .note a').click()")
    browser.waits("document.querySelectorAll('.waterfall .bar').length > 8")
    rows = browser.run("return [...document.querySelectorAll('.waterfall .row > span')].map((one) => one.title)")
    assert {"queue", "route", "reserve", "prefill", "decode", "kv.transfer", "chunks", "layer pushes", "step"} <= {
        *rows
    }
    browser.run("document.querySelector('.bar.kv-transfer').focus()")
    browser.shows("kv.transfer.bytes", "tcp")


def test_a_parameter_that_is_refused_is_named(browser: Browser, keys: dict[str, str]) -> None:
    browser.enter(keys["admin"])
    browser.open("playground")
    browser.waits("document.querySelector('select option')")
    browser.type("[name=temperature]", "9")
    browser.type(".chat textarea", "hello", Keys.CONTROL, Keys.ENTER)
    browser.shows("temperature", "must be")
    assert [message for message in browser.problems() if "400" not in message] == []


def test_workers_and_links_are_shown_and_found(browser: Browser, keys: dict[str, str]) -> None:
    browser.enter(keys["admin"])
    browser.open("workers")
    browser.shows("decode-0", "prefill-0", "1 of 1", "tcp", "up")
    browser.run("document.activeElement.blur()")
    browser.type("body", "/")
    browser.driver.switch_to.active_element.send_keys("role-of-none")
    browser.shows("No worker.")
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.type("body", "1")
    browser.shows("Between tokens")
    browser.type("body", "?")
    browser.shows("leave a field, close this")


@pytest.mark.parametrize("view", ["overview", "workers", "requests", "playground"])
def test_it_fits_a_phone_and_follows_dark_mode(browser: Browser, keys: dict[str, str], view: str) -> None:
    browser.enter(keys["admin"])
    browser.shows("ready")
    browser.open(view)
    background: Callable[[], Any] = lambda: browser.run("return getComputedStyle(document.body).backgroundColor")  # noqa: E731
    for size, scheme, color in ((PHONE, "dark", DARK), (PHONE, "light", LIGHT), (DESKTOP, "dark", DARK)):
        browser.look(size, scheme)
        eventually(lambda color=color: background() == color, BOUND_S, color)
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), (size, scheme)
