"""The report in a real browser, opened from disk with the network off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedpick.report import write_report
from tests.report.report_store import HOSTILE, make_spec, make_store

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'fedpick[dev]'")

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"needs Chromium at {CHROMIUM} (apt install chromium)")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run"),
]
LABELS = ("uniform", "fedcor", "ca-fed", HOSTILE)


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    store = make_store(folder / "toy.sqlite", make_spec(LABELS))
    path = write_report(store, folder / "report.html", against="uniform")
    store.close()
    return path


class Opened:
    """A page, and everything that it complained about or asked the network for."""

    def __init__(self, browser, path, **options):
        options.setdefault("viewport", {"width": 1400, "height": 900})
        self.context = browser.new_context(offline=True, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda r: None if r.url == path.as_uri() else self.note(r.url))
        self.page.goto(path.as_uri())
        self.wait()

    def note(self, url):
        if not url.startswith(("data:", "blob:")):
            self.complaints.append(f"asked for {url}")

    def wait(self):
        self.page.wait_for_function("document.documentElement.dataset.ready === 'true'")

    def traces(self, key, what="each.visible !== false"):
        code = f"id => document.getElementById(id).data.filter(each => {what}).length"
        return self.page.evaluate(code, f"plot-{key}")

    def x_title(self, key):
        return self.page.evaluate("id => document.getElementById(id)._fullLayout.xaxis.title.text", f"plot-{key}")


@pytest.fixture
def opened(browser, report):
    made = Opened(browser, report, color_scheme="light")
    yield made
    made.context.close()
    assert made.complaints == []


def test_every_figure_is_drawn(opened):
    figures = opened.page.locator(".plot")
    assert figures.count() == 16
    for index in range(figures.count()):
        plot = figures.nth(index)
        key = plot.get_attribute("id")
        assert plot.get_attribute("data-drawn") == "true", key
        marks = plot.locator(".scatterlayer path, .heatmaplayer image, .barlayer path").count()
        assert marks > 0, f"{key} has no marks"
        buttons = plot.locator(".modebar-btn").evaluate_all("all => all.map(each => each.dataset.title)")
        assert {"Zoom", "Pan", "Reset axes"} <= set(buttons)
        assert len(buttons) == 6, buttons  # none of those that lead to a web site
        box = plot.locator("svg.main-svg").first.bounding_box()
        assert box["width"] > 300 and box["height"] > 250, key


def test_toggling_a_policy_hides_it_everywhere(opened):
    chip = opened.page.locator('.chip[data-policy="fedcor"]')
    before = {key: opened.traces(key) for key in ("accuracy", "loss", "targets", "frequency", "fairness", "weight")}
    chip.click()
    opened.wait()
    assert chip.get_attribute("aria-pressed") == "false"
    for key, count in before.items():
        assert opened.traces(key) < count
        assert opened.traces(key, "each.visible !== false && (each.meta || {}).policy === 'fedcor'") == 0
    chip.click()
    opened.wait()
    assert {key: opened.traces(key) for key in before} == before


def test_by_bytes(opened):
    assert opened.x_title("accuracy") == "round"
    opened.page.get_by_text("by bytes", exact=True).click()
    opened.page.wait_for_function("document.getElementById('plot-loss')._fullLayout.xaxis.title.text.includes('bytes')")
    assert "bytes" in opened.x_title("accuracy")
    last = "() => Math.max(...document.getElementById('plot-accuracy').data.flatMap(each => each.x))"
    assert opened.page.evaluate(last) == 30 * 5000
    assert opened.page.get_by_text("by wall time", exact=True).count() == 0


def test_every_seed_smoothing_measures_and_runs_can_be_chosen(opened):
    opened.page.get_by_text("every seed", exact=True).click()
    opened.page.wait_for_function("document.getElementById('plot-accuracy').data.length === 8")
    opened.page.get_by_text("mean of 5", exact=True).click()
    opened.page.get_by_text("variance of counts", exact=True).click()
    opened.page.wait_for_function(
        "document.getElementById('plot-fairness')._fullLayout.yaxis.title.text === 'variance of counts'"
    )
    before = opened.page.evaluate("JSON.stringify(document.getElementById('plot-raster').data[0].z)")
    opened.page.select_option("#raster-view", label=f"{HOSTILE}, seed 1")
    opened.page.wait_for_function(
        "before => JSON.stringify(document.getElementById('plot-raster').data[0].z) !== before", arg=before
    )
    opened.page.select_option("#labels-policy", value="ca-fed")


def test_clients_by_group_or_by_number(opened):
    rows = "document.getElementById('plot-raster')._fullLayout.yaxis.ticktext"
    assert any("available" in name for name in opened.page.evaluate(rows))
    assert "less available" in opened.page.evaluate("document.getElementById('plot-raster').data[0].text[0][0]")
    grouped = opened.page.evaluate("document.getElementById('plot-raster').data[0].z.map(String).sort()")
    opened.page.get_by_text("by number", exact=True).click()
    opened.page.wait_for_function(
        "!document.getElementById('plot-raster').data[0].text[0][0].includes('less available')"
    )
    # The same rows in another order.
    assert opened.page.evaluate("document.getElementById('plot-raster').data[0].z.map(String).sort()") == grouped


def test_groups_and_differences_can_be_asked_for_other_measures(opened):
    title = "key => document.getElementById('plot-' + key)._fullLayout.%s.title.text"
    assert opened.page.evaluate(title % "yaxis", "importance") == "share of all weight"
    opened.page.select_option("#importance-measure", value="left-out")
    opened.page.wait_for_function(
        "document.getElementById('plot-importance')._fullLayout.yaxis.title.text === 'left out while available'"
    )
    assert "final accuracy" in opened.page.evaluate(title % "xaxis", "differences")
    opened.page.select_option("#differences-measure", value="lowest test loss")
    opened.page.wait_for_function(
        "document.getElementById('plot-differences')._fullLayout.xaxis.title.text.includes('left is better')"
    )
    assert opened.traces("differences") == len(LABELS) - 1
    opened.page.locator('.chip[data-policy="fedcor"]').click()
    opened.wait()
    assert opened.traces("differences") == len(LABELS) - 2
    assert opened.traces("importance-rounds", "each.name === 'target'") == 0
    opened.page.select_option("#importance-rounds-measure", index=1)
    opened.page.wait_for_function(
        "document.getElementById('plot-importance-rounds').data.some(each => each.name === 'target')"
    )


def test_a_phone_shows_everything_without_scrolling_sideways(browser, report):
    opened = Opened(browser, report, viewport={"width": 390, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    opened.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    cut = "all => all.filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.textContent)"
    assert opened.page.locator(".card, .tile, figure, .chips, .verdict").evaluate_all(cut) == []
    assert (
        opened.page.locator(".card td").first.evaluate("each => getComputedStyle(each, '::before').content") != "none"
    )
    # Neither the bar of policies nor Plotly's buttons lie over a plot.
    opened.page.locator("#plot-accuracy").scroll_into_view_if_needed()
    assert opened.page.locator(".toolbar").evaluate("each => getComputedStyle(each).position") == "static"
    assert opened.page.locator(".modebar-btn").count() == 0
    assert opened.complaints == []
    opened.context.close()


def test_the_effective_cohort_is_drawn_from_zero(opened):
    low, high = opened.page.evaluate("document.getElementById('plot-weight')._fullLayout.yaxis.range")
    assert low <= 0 < 2 < high


def test_hovering_says_what_it_is(opened):
    opened.page.locator("#plot-accuracy").scroll_into_view_if_needed()
    box = opened.page.locator("#plot-accuracy .nsewdrag").bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = opened.page.locator("#plot-accuracy .hoverlayer")
    label.get_by_text("uniform").first.wait_for(state="attached")
    text = label.text_content()
    assert "±" in text
    assert HOSTILE in text  # shown as it is, not read as markup


def test_the_keyboard_is_enough(opened):
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.policy") == "uniform"
    page.keyboard.press("Space")
    opened.wait()
    assert page.locator('.chip[data-policy="uniform"]').get_attribute("aria-pressed") == "false"
    page.locator("#axis-round").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.getElementById('plot-accuracy')._fullLayout.xaxis.title.text.includes('bytes')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("document.getElementById('plot-accuracy')._fullLayout.xaxis.title.text === 'round'")
    page.locator("#plot-accuracy").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#plot-accuracy .hoverlayer").get_by_text("fedcor").first.wait_for(state="attached")
    width = "() => { const r = document.getElementById('plot-accuracy')._fullLayout.xaxis.range; return r[1] - r[0]; }"
    before = page.evaluate(width)
    page.keyboard.press("+")
    assert page.evaluate(width) == pytest.approx(0.8 * before)
    page.keyboard.press("0")
    assert page.evaluate(width) == pytest.approx(before)


def test_light_and_dark(browser, report):
    background = "getComputedStyle(document.body).backgroundColor"
    colour = "document.getElementById('plot-accuracy').data.at(-1).line.color"
    seen = {}
    for scheme in ("light", "dark"):
        opened = Opened(browser, report, color_scheme=scheme)
        seen[scheme] = (opened.page.evaluate(background), opened.page.evaluate(colour))
        opened.page.locator("#theme").click()
        opened.wait()
        seen[f"from {scheme}"] = (opened.page.evaluate(background), opened.page.evaluate(colour))
        assert opened.complaints == []
        opened.context.close()
    assert seen["light"] == seen["from dark"] != seen["dark"] == seen["from light"]


@pytest.mark.parametrize("rounds", [0, 1])
def test_pages_with_next_to_nothing_have_no_errors(browser, tmp_path, rounds):
    store = make_store(tmp_path / "s.sqlite", make_spec(("uniform", "ca-fed"), seeds=1), done=rounds)
    opened = Opened(browser, write_report(store, tmp_path / "r.html"))
    assert (opened.page.locator(".plot").count() > 0) == (rounds > 0)
    assert opened.page.locator(".plot:not([data-drawn])").count() == 0
    assert opened.complaints == []
    opened.context.close()
    store.close()


def test_many_clients_and_rounds_are_drawn_in_groups(browser, tmp_path):
    store = make_store(tmp_path / "s.sqlite", make_spec(("uniform",), seeds=1, rounds=20), num_clients=3000)
    opened = Opened(browser, write_report(store, tmp_path / "r.html"))
    assert opened.traces("raster") == 2
    assert opened.page.locator("#plot-raster .heatmaplayer image").count() == 2
    assert opened.complaints == []
    opened.context.close()
    store.close()
