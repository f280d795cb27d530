"""The report in a browser: every page is drawn, nothing goes wrong on the console, nothing is asked of the network.

Needs Chromium and its driver (Debian: ``apt-get install chromium chromium-driver``); skipped without them. The driver is
spoken to in the WebDriver protocol, over HTTP on this computer.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

import layup
import minidnn
import models
from layup.report import Row, report_data, waterfall, write_report
from minidnn.compile import make_step

BROWSER = next(
    (p for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (p := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1280,943",
)  # fmt: skip
PAGES = ("lifetimes", "bill", "curve", "streams", "ring")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"

pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="needs Chromium and chromedriver (apt-get install chromium chromium-driver)",
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a test may speak to this computer, and to no other."""
    connect = socket.socket.connect

    def local(self: socket.socket, address: Any) -> None:
        assert address[0] == "127.0.0.1", f"a test tried to reach {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local)


class Browser:
    """One session of a headless browser."""

    def __init__(self, driver: subprocess.Popen[str], profile: Path) -> None:
        assert driver.stdout is not None
        port = next(m[1] for line in driver.stdout if (m := re.search(r"on port ([1-9]\d*)", line)))
        self._base = f"http://127.0.0.1:{port}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": BROWSER}
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logs}
        self._base += "/" + self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _call(self, method: str, path: str, data: Any = None) -> Any:
        body = None if data is None else json.dumps(data).encode()
        with urlopen(
            Request(self._base + path, body, {"Content-Type": "application/json"}, method=method), timeout=60
        ) as r:
            return json.load(r)["value"]

    def open(self, path: Path) -> None:
        """Open a file, and wait until the report says that it is ready."""
        self.console(), self.requests()  # of the page before
        self._call("POST", "/url", {"url": path.as_uri()})
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self._call("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        limit = time.monotonic() + 30
        while not self.run(condition):
            assert time.monotonic() < limit, f"{condition} did not come true; console: {self.console()}"
            time.sleep(0.05)

    def click(self, selector: str) -> Any:
        """Click an element as a person does, who waits while the page is moving: it must be there, seen and not covered."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        limit = time.monotonic() + 10
        while True:
            try:
                return self._call("POST", f"/element/{found[ELEMENT]}/click", {})
            except HTTPError as error:
                why = error.read().decode()
                assert error.code == 400 and time.monotonic() < limit, f"{selector} cannot be clicked: {why}"
                time.sleep(0.1)

    def point(self, selector: str, *moves: tuple[float, float]) -> None:
        """Move the pointer over an element, through points given as fractions of its box."""
        box = self.run(
            f"(b => [b.left, b.top, b.width, b.height])(document.querySelector('{selector}').getBoundingClientRect())"
        )
        at = [(round(box[0] + x * box[2]), round(box[1] + y * box[3])) for x, y in moves]
        steps = [{"type": "pointerMove", "x": x, "y": y, "duration": 20} for x, y in at]
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": steps}
        self._call("POST", "/actions", {"actions": [pointer]})

    def console(self) -> list[Any]:
        """What has been written to the console since the last call."""
        messages: list[Any] = self._call("POST", "/se/log", {"type": "browser"})
        return messages

    def requests(self) -> list[str]:
        """Addresses that the page has asked for since the last call."""
        entries = self._call("POST", "/se/log", {"type": "performance"})
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def close(self) -> None:
        """End the session."""
        self._call("DELETE", "")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser with a new profile."""
    assert DRIVER is not None
    command = [DRIVER, "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        try:
            session = Browser(driver, tmp_path_factory.mktemp("profile"))
            try:
                yield session
            finally:
                session.close()
        finally:
            driver.terminate()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two reports by the name of the net: one with everything in it, one with many rectangles."""
    folder = tmp_path_factory.mktemp("reports")
    paths = {name: folder / f"{name}.html" for name in ("resnet20", "resnet152")}
    graph = models.build("resnet20", batch=32, classes=10)
    chosen = layup.plan(graph, policy="layup", device=None, profile="v100")
    step = make_step(chosen.context.request, chosen.plan, chosen.program, chosen.memory)
    assert len(set(step.plan.decisions.values())) == 2  # offload and recompute
    sizes = (step.profile.peak_bytes, step.profile.reserved_bytes, step.profile.host_bytes)
    memory = step.profile.reserved_bytes + 2**20
    fits, beyond = Row("layup", memory, True, *sizes, step.profile.step_seconds, 1e9), Row("keep", memory, False)
    curve = {"rows": [fits._asdict(), beyond._asdict()], "minimum_bytes": sizes[1]}
    write_report(paths["resnet20"], step, planned=chosen, curve=curve, waterfall=waterfall(step), memory=memory)
    step = minidnn.compile(models.build("resnet152", batch=32), device=None)
    write_report(paths["resnet152"], step, waterfall=())
    return paths


COLOURS = """(canvas => {
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [canvas.width, canvas.height];
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
  const found = new Set();
  for (let i = 0; i < data.length; i += 4 * 97) found.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return found.size;
})(document.querySelector('#%s canvas'))"""

ZOOM = """(canvas => {
  canvas.focus();
  for (const key of ["+", "+", "d"]) canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
})(document.querySelector("#lifetimes canvas"))"""

FIND = """(input => {
  input.value = "layer1.0.relu";
  input.dispatchEvent(new Event("input"));
  input.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
})(document.querySelector("#lifetimes input[type=search]"))"""


@pytest.mark.parametrize("net", ["resnet20", "resnet152"])
def test_every_page_is_drawn_without_a_complaint_and_without_the_network(
    browser: Browser, reports: dict[str, Path], net: str
) -> None:
    path = reports[net]
    assert path.stat().st_size < 5_000_000
    browser.open(path)
    assert browser.run("document.getElementById('unexplained').innerText") == "0 bytes unexplained"
    for page in PAGES:
        browser.click(f"#tab-{page}")
        browser.wait(f"!document.getElementById('{page}').hidden")
        shown = browser.run(f"{list(PAGES)}.filter(page => document.getElementById(page).offsetHeight > 30)")
        assert shown == [page]
        if browser.run(f"(c => c !== null && c.offsetHeight > 0)(document.querySelector('#{page} canvas'))"):
            browser.wait(f"{COLOURS % page} > 4")
    drawn = browser.run("[...document.querySelectorAll('canvas')].length")
    assert drawn == (3 if net == "resnet20" else 2)
    browser.click("#tab-lifetimes")
    browser.click("[data-value=naive]")
    assert browser.run("document.getElementById('unexplained').innerText") == "0 bytes unexplained"
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")  # nothing hangs out of the page
    assert browser.console() == []
    asked = browser.requests()
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]


def test_pointer_and_keys_say_what_a_rectangle_is(browser: Browser, reports: dict[str, Path]) -> None:
    browser.open(reports["resnet20"])
    browser.point("#lifetimes canvas", (0.5, 0.5), (0.52, 0.55))
    browser.wait("!document.getElementById('tip').hidden")
    text = browser.run("document.getElementById('tip').innerText")
    assert "alive" in text and re.search(r"row \d+: ", text), text
    before = browser.run(COLOURS % "lifetimes")
    browser.run(ZOOM)
    browser.wait(f"{COLOURS % 'lifetimes'} !== {before}")
    browser.run(FIND)
    browser.wait("document.querySelector('#lifetimes-details .name') !== null")
    assert "layer1.0.relu" in browser.run("document.querySelector('#lifetimes-details').innerText")
    assert browser.run("document.querySelectorAll('#lifetimes-details .reason').length") == 1
    assert browser.console() == []


def test_the_ring_steps_through_its_chunks_and_shows_what_the_engine_computes(
    browser: Browser, reports: dict[str, Path]
) -> None:
    """Each step's numbers are on the page; the sums and new weights are those of NumPy; buttons, keys and play move on."""
    data = layup.report.read_data(reports["resnet20"].read_text(encoding="utf-8"))["ring"]
    gradients = np.array(data["gradients"])
    frames, total = data["frames"]["ring_delayed"], gradients.sum(0)
    after = np.array(data["weights"]) - data["rate"] * total
    np.testing.assert_allclose(frames[-1]["weights"], np.tile(after, (4, 1)), atol=1e-6)
    browser.open(reports["resnet20"])
    browser.click("#tab-ring")
    for number, frame in enumerate(frames):
        shown = browser.run("[...document.querySelectorAll('#ring-figure text')].map(t => t.textContent)")
        for value in np.round([*frame["sums"][0], *total[: 4 * (number >= 3)], *after[: 4 * (number == 8)]], 4):
            assert f"{value:g}".replace("-", "−") in shown, (number, value)
        assert shown.count("sum") == (4 if number >= 3 else 0)
        arrows = browser.run("document.querySelectorAll('#ring-figure path.arrow').length")
        assert arrows == (0 if number in (0, 8) else 4)
        if number < 8:
            browser.click("#ring-next")
    assert browser.run("document.getElementById('ring-next').disabled")
    assert "W(t+1)" in shown and shown.count("W(t−1)") == 0 and shown.count("reads W(t)") == 4  # two weights
    browser.click("#ring-controls [data-value=ring]")
    assert "W(t+1)" not in browser.run("document.getElementById('ring-figure').textContent")
    browser.click("#ring-back")
    assert "ring step 3 of 3" in browser.run("document.getElementById('ring-caption').textContent")
    browser.click("#ring-next")
    browser.click("#ring-play")
    browser.wait("document.getElementById('ring-caption').textContent.startsWith('Reduce-scatter, ring step 1 of 3')")
    assert browser.console() == []


def test_a_rectangle_that_is_missing_is_seen_on_the_page(browser: Browser, tmp_path: Path) -> None:
    """The page counts for itself: the text does not come from the program that wrote it."""
    step = minidnn.compile(models.build("lenet", batch=4), device=None)
    data = report_data(step, waterfall=())
    index = data["views"]["plan"]["buffers"]["host"].index(0)
    data["views"]["plan"]["buffers"]["blocks"][index] -= 2
    path = tmp_path / "report.html"
    path.write_text(layup.report.render(data), encoding="utf-8")
    browser.open(path)
    assert browser.run("document.getElementById('unexplained').innerText") == "1,024 bytes unexplained"
