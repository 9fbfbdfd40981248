"""The dashboard: its answers, its guards, and the page in a real browser while a run goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import fedpick
from fedpick.core.errors import InvalidInput
from fedpick.experiments.recorder import Recorder
from fedpick.experiments.store import Store, open_store
from tests.report.report_store import HOSTILE, make_spec, make_store

pytest.importorskip("starlette", reason="needs the dashboard: pip install 'fedpick[dashboard]'")
pytest.importorskip("plotly", reason="needs the report: pip install 'fedpick[report]'")
testclient = pytest.importorskip("starlette.testclient", reason="needs httpx: pip install 'fedpick[dev]'")

from fedpick.dashboard import content, server  # noqa: E402

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("dashboard") / "s.sqlite"
    make_store(file, make_spec(("uniform", HOSTILE), rounds=8)).close()
    make_store(file, make_spec(("uniform",), rounds=12, title="longer", budget=3), done=5).close()
    return file


@pytest.fixture(scope="module")
def store(path):
    opened = open_store(path)
    yield opened
    opened.close()


def client_of(store, token=None, host="127.0.0.1"):
    return testclient.TestClient(server.build_app(store, token=token), base_url=f"http://{host}")


def test_the_list_shows_progress_and_states(store):
    latest, first = content.overview(store)
    assert (latest["title"], latest["done"], latest["wanted"], latest["states"]) == ("longer", 10, 24, {"stopped": 2})
    assert first["states"] == {"done": 4} and first["done"] == first["wanted"] == 32
    assert [policy["label"] for policy in first["policies"]] == ["uniform", HOSTILE]


def test_a_run_whose_process_has_ended_is_interrupted(tmp_path):
    store = make_store(tmp_path / "s.sqlite", make_spec(("uniform",), seeds=2, rounds=8), done=3)
    store.update_run(1, status="running")
    store.update_run(2, status="running")
    store.take(2)
    reader = open_store(tmp_path / "s.sqlite")
    assert content.overview(reader)[0]["states"] == {"interrupted": 1, "running": 1}
    reader.close()
    store.close()


def test_curves_are_means_over_the_seeds(store):
    found = content.curves(store, [1, 2], "accuracy")
    assert [(line["experiment"], line["label"]) for line in found["lines"]] == [
        (1, "uniform"),
        (1, HOSTILE),
        (2, "uniform"),
    ]
    runs = [run for run in store.runs(1) if run.label == "uniform"]
    naive = np.mean([store.rounds(run.id)["accuracy"] for run in runs], axis=0)
    np.testing.assert_allclose(found["lines"][0]["mean"], naive, rtol=1e-4)
    assert found["lines"][0]["round"] == list(range(1, 9))
    assert found["lines"][2]["round"] == list(range(1, 6))
    assert content.curves(store, [1], "objective")["lines"] == []  # never measured
    for wrong in (([1], "nosuch"), ([9], "accuracy"), (list(range(1, 30)), "accuracy")):
        with pytest.raises(InvalidInput):
            content.curves(store, *wrong)


def test_every_route_answers_and_bad_requests_are_sentences(store):
    client = client_of(store)
    for address, kind in (
        ("/", "text/html"), ("/assets/dashboard.js", "text/javascript"), ("/assets/page.css", "text/css"),
        ("/api/experiments", "application/json"), ("/api/curves?experiment=1", "application/json"),
        ("/report/1", "text/html"),
    ):  # fmt: skip
        answer = client.get(address)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind), address
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert client.get("/report/1").text == client.get("/report/1").text
    for address in (
        "/api/curves?experiment=x",
        "/api/curves?experiment=77",
        "/api/curves?measure=rounds;drop",
        "/report/7",
    ):
        answer = client.get(address)
        assert answer.status_code == 400 and answer.json()["error"].endswith("."), address
    assert client.get("/assets/..%2fserver.py").status_code == 404
    assert client.post("/api/experiments").status_code == 405


def test_names_that_point_here_from_elsewhere_are_refused(store):
    assert client_of(store, host="evil.example").get("/api/experiments").status_code == 400
    assert client_of(store, host="localhost").get("/api/experiments").status_code == 200


def test_a_token_is_needed_where_others_can_reach_it(store):
    client = client_of(store, token="secret", host="10.0.0.7")
    for address in ("/", "/api/experiments", "/report/1", "/assets/dashboard.js", "/?token=wrong"):
        answer = client.get(address)
        assert answer.status_code == 401 and "toy" not in answer.text, address
    answer = client.get("/?token=secret", follow_redirects=False)
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    assert (
        "httponly" in answer.headers["set-cookie"].lower() and "samesite=strict" in answer.headers["set-cookie"].lower()
    )
    assert client.get("/api/experiments").status_code == 200
    assert server.is_loopback("127.0.0.1") and server.is_loopback("localhost") and server.is_loopback("::1")
    assert not server.is_loopback("0.0.0.0") and not server.is_loopback("example.org")
    assert len(server.new_token()) >= 43


class Served:
    """The command `fedpick dashboard` in a process of its own."""

    def __init__(self, path, *more):
        command = [sys.executable, "-m", "fedpick", "dashboard", "--port", "0", "--store", str(path), *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said = self.process.stdout.readline()
        self.link = self.said.split()[-1]

    def end(self):
        self.process.terminate()
        return self.process.communicate(timeout=60)


def test_the_command_serves_and_ends(path):
    served = Served(path)
    try:
        assert re.fullmatch(r"Dashboard: http://127\.0\.0\.1:\d+/\n", served.said)
        with urllib.request.urlopen(f"{served.link}api/experiments", timeout=60) as answer:
            assert b'"longer"' in answer.read()
        port = served.link.split(":")[-1].strip("/")
        command = [sys.executable, "-m", "fedpick", "dashboard", "--port", port, "--store", str(path)]
        taken = subprocess.run(command, capture_output=True, text=True)
        assert taken.returncode == 2 and "--port 0" in taken.stderr and "Traceback" not in taken.stderr
    finally:
        _, errors = served.end()
    assert "Traceback" not in errors


def until(page, expression):
    """Wait for something on a page that forbids eval, which Playwright's own function uses."""
    for _ in range(1200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(150)
    raise AssertionError(f"never true: {expression}")


def test_the_page_follows_a_run(tmp_path):
    """In a real browser: the list, curves that grow while a run writes, another measure, a comparison, the report."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'fedpick[dev]'")
    if not CHROMIUM.exists():
        pytest.skip(f"needs Chromium at {CHROMIUM} (apt install chromium)")
    file = tmp_path / "s.sqlite"
    make_store(file, make_spec(("uniform", HOSTILE), rounds=8, title="before")).close()
    clients = fedpick.Clients(num_examples=np.ones(6))
    session = fedpick.Session(fedpick.policies.get("uniform"), clients, seed=1)
    writer = Store(file)

    def train(rounds):
        for _ in range(rounds):
            selection = session.ask(budget=2)
            outcome = fedpick.Outcome(index=session.round, clients=selection.clients, completed=np.ones(2, bool))
            session.tell(outcome)
            recorder.round(selection, outcome, test_accuracy=0.5 + 0.01 * outcome.index)

    recorder = Recorder(writer, session, experiment="now", rounds=30)
    train(3)
    served = Served(file)
    complaints: list[str] = []
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    try:
        with sync_api.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=arguments)
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            page.set_default_timeout(180_000)
            page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on(
                "request",
                lambda r: None if r.url.startswith((served.link, "data:", "blob:")) else complaints.append(r.url),
            )
            page.goto(served.link)
            page.locator("html[data-ready='true']").wait_for()
            assert page.locator(".experiment").count() == 2
            assert page.locator(".experiment").first.inner_text().startswith("now")
            assert page.locator("#live").inner_text() == "live"
            assert page.evaluate("document.getElementById('plot').dataset.points") == "3"
            train(4)
            until(page, "document.getElementById('plot').dataset.points === '7'")
            # The list may have been read a moment before the curves.
            until(page, "document.querySelector('.experiment').innerText.includes('7 of 30 rounds')")
            page.locator("#experiment-1").check()
            until(page, "document.getElementById('plot').data.length === 3")
            assert HOSTILE in page.locator("#values").inner_text()  # shown as it is, not read as markup
            assert page.url.endswith("#2,1")
            page.select_option("#axis", "bytes")
            until(page, "document.getElementById('plot')._fullLayout.xaxis.title.text.startsWith('bytes')")
            page.select_option("#measure", "loss")
            until(page, "document.getElementById('plot').data.length === 2")
            recorder.close()
            until(page, "document.getElementById('live').dataset.state === 'idle'")
            if folder := os.environ.get("SCREENSHOTS"):
                page.select_option("#measure", "accuracy")
                page.select_option("#axis", "round")
                until(page, "document.getElementById('plot').data.length === 3")
                page.screenshot(path=f"{folder}/wide.png", full_page=True)
            page.set_viewport_size({"width": 390, "height": 800})
            until(page, "document.documentElement.scrollWidth <= 390")
            if folder:
                page.wait_for_timeout(1500)
                page.screenshot(path=f"{folder}/phone.png", full_page=True)
            with page.expect_popup() as opened:
                page.locator(".experiment a").first.click()
            opened.value.locator("html[data-ready='true']").wait_for(timeout=180_000)
            assert opened.value.locator("h1").inner_text() == "now"
            browser.close()
    finally:
        served.end()
        writer.close()
    assert complaints == []
