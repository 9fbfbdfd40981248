from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from fedpick.core.errors import InvalidInput
from fedpick.experiments.toml import toml_text
from fedpick.report import write_figures, write_report
from fedpick.report.analysis import rounds_to_target
from fedpick.report.charts import sections_of
from fedpick.report.charts.chart import numbers, styles_of
from fedpick.report.charts.learned import cluster_order, flat_map
from fedpick.report.html import _tiles
from fedpick.report.material import CHOSEN, FAILED, read_material
from fedpick.report.verdict import verdict_of
from tests.report.report_store import HOSTILE, make_spec, make_store


def charts_of(store):
    return {chart.key: chart for section in sections_of(read_material(store)) for chart in section.charts}


def content_of(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="fedpick-data">(.*?)</script>', text, re.S).group(1))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    made = make_store(tmp_path_factory.mktemp("store") / "toy.sqlite")
    yield made
    made.close()


def test_the_page_is_one_file_that_asks_for_nothing(store, tmp_path):
    path = write_report(store, tmp_path / "deep" / "report.html")
    text = path.read_text(encoding="utf-8")
    assert list(path.parent.iterdir()) == [path]
    addresses = []

    class Addresses(HTMLParser):
        def handle_starttag(self, tag, attributes):
            values = dict(attributes)
            addresses.extend(values[name] for name in ("src", "href", "data", "poster") if name in values)

    Addresses().feed(text)
    assert addresses and all(address.startswith(("#", "data:,")) for address in addresses)
    assert "default-src 'none'" in text
    assert len(text) < 6_500_000


def test_every_chart_is_there_with_a_place_a_title_and_a_sentence(store, tmp_path):
    text = write_report(store, tmp_path / "r.html").read_text(encoding="utf-8")
    keys = [chart["key"] for chart in content_of(tmp_path / "r.html")["charts"]]
    assert keys == [
        *("accuracy", "loss", "targets", "frequency", "fairness", "raster", "importance", "importance-rounds"),
        *("weight", "label-distance", "labels", "correlation", "embedding", "bounds", "diagnostics"),
    ]
    for key in keys:
        assert f'id="plot-{key}"' in text
        assert re.search(rf'id="title-{key}">[^<]+<', text)
        assert re.search(rf'id="caption-{key}">[^<]+\.<', text)


def test_settings_seeds_versions_commands_and_citations_are_there(store, tmp_path):
    text = write_report(store, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "log-normal (beta = 0.5)" in text
    assert "fedpick run experiment.toml" in text
    assert store.experiment().hash in text
    assert "@misc{fedcor, title = {A &amp; B}}" in text
    assert "<dt>fedpick</dt><dd>0.1.0</dd>" in text


def test_lines_are_means_and_deviations_over_the_seeds(store):
    material = read_material(store)
    chart = charts_of(store)["accuracy"]
    policy = material.results.policies[1]
    runs = np.stack([run.rounds["accuracy"] for run in policy.runs])
    line = chart.data["measures"][0]["series"]["fedcor"]
    np.testing.assert_allclose(line["mean"], runs.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(line["sd"], runs.std(axis=0, ddof=1), rtol=1e-3)
    assert line["round"] == list(range(1, 31))
    assert line["bytes"] == [3000 * step for step in range(1, 31)]
    # No axis of wall time: it would show who compiled the programs.
    assert chart.data["axes"] == ["round", "bytes"]
    assert "seconds" not in line


def test_bars_are_those_of_the_tables(store):
    material = read_material(store)
    cells = charts_of(store)["targets"].data["measures"][0]["series"]["uniform"]
    wanted = [rounds_to_target(run, 0.5) for run in material.results.policies[0].runs]
    assert cells[0] == {
        "mean": numbers(np.mean(wanted)), "sd": numbers(np.std(wanted, ddof=1)), "reached": 2, "seeds": 2,
    }  # fmt: skip


def test_fairness_weights_and_rasters_against_the_plain_definitions(store):
    material = read_material(store)
    run = material.results.policies[0].runs[0]
    trace = material.histories[run.run.id]
    records = list(store.records(run.run.id))
    counts = np.zeros(40)
    for step, record in enumerate(records):
        clients, completed = record.selection.clients, record.outcome.completed
        counts[clients] += 1
        assert trace.jain[step] == pytest.approx(counts.sum() ** 2 / (40 * (counts**2).sum()))
        assert trace.variance[step] == pytest.approx(counts.var())
        assert trace.coverage[step] == pytest.approx((counts > 0).mean())
        column = trace.raster.exact[:, step]
        np.testing.assert_array_equal(np.flatnonzero(column >= CHOSEN), np.sort(clients))
        np.testing.assert_array_equal(np.flatnonzero(column == FAILED), np.sort(clients[~completed]))
        assert trace.effective[step] == pytest.approx(completed.sum())
        mix = store.federation(run.run.federation_id).label_histogram[clients[completed]].sum(axis=0)
        np.testing.assert_allclose(trace.labels[step], mix / mix.sum())


def test_clusters_become_neighbours():
    groups = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    order = cluster_order((groups[:, None] == groups).astype(float))
    assert np.count_nonzero(np.diff(groups[order])) == 2


def test_maps_of_few_clients_are_principal_components():
    vectors = np.outer(np.arange(5.0), np.ones(4))
    name, flat = flat_map(vectors)
    assert name == "PCA"
    np.testing.assert_allclose(np.abs(flat[:, 0]), np.abs(2 * (np.arange(5) - 2)), atol=1e-12)
    np.testing.assert_allclose(flat[:, 1], 0, atol=1e-12)
    assert flat_map(np.random.default_rng(0).normal(size=(40, 5)))[0] == "t-SNE"


def test_colours_belong_to_policies_and_repeat_in_another_line_style():
    styles = styles_of([f"p{index}" for index in range(20)])
    assert len({(style.light, style.dash) for style in styles.values()}) == 20
    assert len({style.light for style in list(styles.values())[:8]}) == 8


def test_colours_can_be_seen_on_their_page():
    def luminance(colour):
        parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
        return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]

    for style in styles_of(range(8)).values():
        assert 1.05 / (luminance(style.light) + 0.05) >= 3
        assert (luminance(style.dark) + 0.05) / (luminance("#161d24") + 0.05) >= 3


def test_a_card_names_a_winner_only_where_an_interval_excludes_0(tmp_path):
    made = make_store(tmp_path / "s.sqlite", make_spec(("uniform", "fedgs"), seeds=3, rounds=3, targets=()))
    material = read_material(made)
    styles = styles_of(["uniform", "fedgs"])

    def card(uniform, fedgs):
        for policy, finals in zip(material.results.policies, (uniform, fedgs), strict=True):
            for run, final in zip(policy.runs, finals, strict=True):
                run.rounds["accuracy"][-1] = final
        return re.search(r"Highest final accuracy</p>(.*?)</div>", _tiles(material, styles)).group(1)

    level = card((0.75, 0.75, 0.75), (0.75, 0.75, 0.75))
    assert "uniform" in level and "fedgs" in level and "a tie: 75.0 %" in level
    noise = card((0.75, 0.75, 0.75), (0.70, 0.90, 0.75))
    assert "uniform" in noise and "fedgs" in noise and "a tie: 75.0 to 78.3 %" in noise
    first = card((0.75, 0.75, 0.75), (0.78, 0.78, 0.79))
    assert "uniform" not in first and "fedgs" in first and "78.3 ± 0.6 %" in first and "tie" not in first
    made.close()


def test_the_page_begins_with_the_verdict_and_ends_with_the_appendix(store, tmp_path):
    text = write_report(store, tmp_path / "r.html").read_text(encoding="utf-8")
    sentences = verdict_of(read_material(store).results, read_material(store).accounts).sentences
    shown = re.search(r'<section class="verdict"(.*?)</section>', text, re.S).group(1)
    found = re.findall(r'<(?:p class="headline"|li)>(.*?)</', shown)
    assert [unescape(each).replace("\N{NO-BREAK SPACE}", " ") for each in found] == list(sentences)
    assert text.index('class="verdict"') < text.index('id="results"') < text.index('id="choices"')
    appendix = text[text.index('<section id="appendix"') : text.index('<section id="settings"')]
    for part in (
        "<h3>Distance from the target importance",
        "<h3>Computing time per round",
        'id="plot-bounds"',
        'id="plot-diagnostics"',
    ):
        assert text.count(part) == appendix.count(part) == 1


def test_a_target_that_no_run_reached_has_no_figure(tmp_path):
    made = make_store(tmp_path / "s.sqlite", make_spec(("uniform",), rounds=3, targets=(1.0,)))
    assert "targets" not in charts_of(made)
    made.close()


def test_shares_and_cohorts_are_drawn_from_zero(store):
    charts = charts_of(store)
    for key in ("weight", "fairness"):
        assert all(measure["from_zero"] for measure in charts[key].data["measures"])
    assert "from_zero" not in charts["accuracy"].data["measures"][0]


def test_labels_and_titles_are_text_neither_markup_nor_formulas(tmp_path):
    made = make_store(tmp_path / "s.sqlite", make_spec((HOSTILE, "$^$"), rounds=3, title=f"{HOSTILE} $\\frac$"))
    path = write_report(made, tmp_path / "r.html")
    assert "<i>a" not in path.read_text(encoding="utf-8")
    assert content_of(path)["policies"][0]["label"] == HOSTILE
    files = write_figures(made, tmp_path / "figures", formats=("svg",), against="$^$")
    assert {file.parent for file in files} == {tmp_path / "figures"}
    assert any("$^$" in file.read_text(encoding="utf-8") for file in files)
    made.close()


@pytest.mark.parametrize("rounds", [0, 1])
@pytest.mark.parametrize("seeds", [1, 2])
def test_stores_with_next_to_nothing(tmp_path, rounds, seeds):
    made = make_store(tmp_path / "s.sqlite", make_spec(("fedcor", "ca-fed"), seeds=seeds, targets=()), done=rounds)
    text = write_report(made, tmp_path / "r.html").read_text(encoding="utf-8")
    assert ("nothing to draw" in text) == (rounds == 0)
    assert bool(content_of(tmp_path / "r.html")["charts"]) == (rounds > 0)
    if seeds == 1:
        assert bool(write_figures(made, tmp_path / "figures", formats=("svg",))) == (rounds > 0)
    made.close()


def test_unfinished_and_failed_runs_are_named_and_lines_stop_where_seeds_differ(tmp_path):
    made = make_store(tmp_path / "s.sqlite", make_spec(("uniform",)), done=lambda run: 10 + 5 * run.seed)
    made.update_run(made.runs(1)[0].id, error="ValueError: <oops>")
    text = write_report(made, tmp_path / "r.html").read_text(encoding="utf-8")
    assert "Not finished: uniform, seed 0 (10 of 30 rounds)" in text
    assert "ValueError: &lt;oops&gt;" in text
    assert len(charts_of(made)["accuracy"].data["measures"][0]["series"]["uniform"]["mean"]) == 10
    made.close()


def test_seeds_of_a_long_run_that_are_a_round_apart_are_drawn(tmp_path):
    made = make_store(tmp_path / "s.sqlite", make_spec(("uniform",), rounds=1000), done=lambda run: 9 + run.seed)
    line = charts_of(made)["fairness"].data["measures"][0]["series"]["uniform"]
    assert line["round"] == [2, 4, 6, 8]  # of a thousand rounds, every second one is kept, and the last
    made.close()


def test_evaluations_now_and_then(tmp_path):
    made = make_store(tmp_path / "s.sqlite", make_spec(("uniform",)), every=7)
    line = charts_of(made)["accuracy"].data["measures"][0]["series"]["uniform"]
    assert line["round"] == [7, 14, 21, 28]
    made.close()


def test_a_million_clients_make_no_larger_file(tmp_path):
    spec = make_spec(("uniform",), seeds=1, rounds=3, budget=1000)
    made = make_store(tmp_path / "s.sqlite", spec, num_clients=1_000_000, num_classes=10)
    path = write_report(made, tmp_path / "r.html")
    assert path.stat().st_size < 5_500_000
    raster = charts_of(made)["raster"].data["views"][0]
    assert raster["available"]["shape"] == [100, 3]
    trace = next(iter(read_material(made).histories.values()))
    assert trace.raster.chosen.sum(axis=0) == pytest.approx([1000] * 3)
    assert trace.raster.available.mean() == pytest.approx(0.6, abs=0.01)
    made.close()


def test_experiments_are_found_by_hash_and_unknown_ones_refused(store, tmp_path):
    write_report(store, tmp_path / "r.html", store.experiment().hash[:8])
    write_report(store, tmp_path / "r.html", store.experiment())
    with pytest.raises(InvalidInput, match="no experiment 'nothing'"):
        write_report(store, tmp_path / "r.html", "nothing")
    with pytest.raises(InvalidInput, match="Got 'jpeg'"):
        write_figures(store, tmp_path, formats=("jpeg",))


def test_the_spec_on_the_page_is_the_spec(store, tmp_path):
    spec = store.experiment().spec
    text = write_report(store, tmp_path / "r.html").read_text(encoding="utf-8")
    shown = unescape(re.search(r'<pre id="spec">(.*?)</pre>', text, re.S).group(1))
    assert tomllib.loads(shown) == {key: value for key, value in spec.items() if value != {}}
    nested = {
        "local": {"lr": {"initial": 0.1, "milestones": [1, 2]}},
        "policies": [{"name": "a b", "x": True, "y": 1e-9}],
    }
    assert tomllib.loads(toml_text(nested)) == nested


@pytest.mark.filterwarnings("ignore:constrained_layout")
def test_long_labels_have_figures_of_their_own(tmp_path):
    labels = ["ö" * 130 + number for number in "ab"]
    made = make_store(tmp_path / "s.sqlite", make_spec(labels, seeds=1, rounds=2), num_clients=4)
    written = [path.stem for path in write_figures(made, tmp_path / "one", formats=("svg",))]
    assert sum(name.startswith("raster-") for name in written) == len(labels)
    made.close()


def test_figures_for_papers_are_the_same_every_time(tmp_path):
    made = make_store(tmp_path / "s.sqlite", make_spec(("fedcor",), seeds=2, rounds=8, targets=(0.3,)), num_clients=12)
    files = {path.name: path.read_bytes() for path in write_figures(made, tmp_path / "one")}
    again = {path.name: path.read_bytes() for path in write_figures(made, tmp_path / "two", formats=("svg",))}
    assert again == {name: content for name, content in files.items() if name.endswith(".svg")}
    for expected in ("accuracy.png", "accuracy-by-bytes.svg", "rounds-to-target.svg", "correlation-fedcor.png"):
        assert len(files[expected]) > 1000
    made.close()


def test_the_report_needs_neither_jax_nor_matplotlib(store, tmp_path):
    code = (
        "import sys; from fedpick.report import write_report; write_report(sys.argv[1], sys.argv[2]);"
        "print(sorted({'jax', 'flwr', 'ray', 'matplotlib'} & set(sys.modules)))"
    )
    where = [str(store.engine.url.database), str(tmp_path / "r.html")]
    assert subprocess.check_output([sys.executable, "-c", code, *where], text=True).strip() == "[]"
