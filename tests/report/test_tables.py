from __future__ import annotations

import csv
import io

import numpy as np
import pytest

from fedpick.core.errors import InvalidInput, UnknownName
from fedpick.experiments.store import Experiment, Run
from fedpick.experiments.tuning import Candidate, Choice
from fedpick.report import analysis, tables
from fedpick.report.analysis import PolicyResults, Quantity, Results, RunResults


def make_run(accuracy, *, seed=0, label="uniform", counts=(1, 1, 2), every=1, wanted=None, loss=None):
    rounds = len(accuracy) * every
    column = np.full(rounds, np.nan)
    column[every - 1 :: every] = accuracy
    losses = np.full(rounds, np.nan)
    losses[every - 1 :: every] = 1 - np.asarray(accuracy) if loss is None else loss
    steps = np.arange(1, rounds + 1)
    run = Run(
        id=seed + 1, key="k", label=label, position=0, policy="uniform", parameters={}, seed=seed, settings={},
        federation_id=1, status="done", rounds_done=rounds, accuracy=None, model_bytes=100, reference="", error=None,
        manifest={}, wall_seconds=0.0,
    )  # fmt: skip
    return RunResults(
        run=run,
        rounds={
            "round": steps - 1,
            "accuracy": column,
            "loss": losses,
            "models_down": 3 * steps,
            "updates_up": 2 * steps,
            "bytes_down": 300 * steps,
            "bytes_up": 200 * steps,
        },
        seconds={"select": 0.001, "measure": 0.0, "train": 0.01, "evaluate": None},
        counts=np.array(counts),
        wanted=rounds if wanted is None else wanted,
    )


def make_results(policies, targets=(0.5,)):
    spec = {"run": {"rounds": 4, "targets": list(targets)}}
    experiment = Experiment(id=1, hash="abcd", title="toy & co", spec=spec, touched_at="")
    lines = [PolicyResults(label=label, policy="uniform", runs=tuple(runs)) for label, runs in policies.items()]
    return Results(experiment=experiment, policies=tuple(lines))


def test_rounds_to_target_counts_from_one_and_knows_never():
    run = make_run([0.2, 0.5, 0.4, 0.9])
    assert analysis.rounds_to_target(run, 0.2) == 1
    assert analysis.rounds_to_target(run, 0.5) == 2
    assert analysis.rounds_to_target(run, 0.91) is None
    assert analysis.rounds_to_target(make_run([0.2, 0.6], every=5), 0.5) == 10


def test_the_smoothed_variant_needs_a_full_window():
    run = make_run([0.9, 0.1, 0.8, 0.9])
    assert analysis.rounds_to_target(run, 0.5) == 1
    assert analysis.rounds_to_target(run, 0.5, window=2) == 2
    assert analysis.rounds_to_target(run, 0.6, window=3) == 3
    assert analysis.rounds_to_target(run, 0.6, window=5) is None


def test_costs_are_those_of_the_round_that_reached_the_target():
    run = make_run([0.2, 0.5, 0.4, 0.9])
    assert analysis.models_to_target(run, 0.5) == 10
    assert analysis.bytes_to_target(run, 0.9) == 2000
    assert analysis.bytes_to_target(run, 0.95) is None


def test_accuracy_loss_fairness_and_time():
    run = make_run([0.2, 0.9, 0.4, 0.6], counts=(0, 4), loss=[3.0, 1.0, np.nan, 2.0])
    assert analysis.final_accuracy(run) == 0.6
    assert analysis.final_accuracy(run, 2) == pytest.approx(0.5)
    assert analysis.best_accuracy(run) == 0.9
    assert analysis.lowest_loss(run) == 1.0
    assert analysis.selection_variance(run) == 4.0
    assert analysis.seconds_per_round(run, "train") == pytest.approx(0.01)
    assert analysis.seconds_per_round(run, "evaluate") is None


def test_mean_and_sd_over_seeds_as_printed_in_papers():
    assert (Quantity((1.0, 3.0)).mean, Quantity((1.0, 3.0)).sd) == (2.0, pytest.approx(np.sqrt(2)))
    assert Quantity((1.0, None)).mean is None
    assert Quantity((1.0,)).sd is None


def test_a_seed_that_never_got_there_makes_it_not_available():
    results = make_results(
        {
            "A": [make_run([0.5] * 4), make_run([0.1, 0.6, 0.6, 0.6], seed=1)],
            "B": [make_run([0.5] * 4), make_run([0.1] * 4, seed=1)],
        }
    )
    first = tables.tables_of(results)[0]
    cells = first.cells()
    assert cells[0][:2] == ["A", "1.5 ± 0.7"]
    assert cells[1][:2] == ["B", "N/A"]
    assert "N/A: some seed" in first.note


@pytest.fixture
def accuracy_table():
    results = make_results({"A_1": [make_run([0.1, 0.2, 0.3, 0.5])], "B": [make_run([0.1, 0.5, 0.3, 0.4])]})
    return tables.tables_of(results, window=2)[0]


def test_markdown_marks_the_best():
    slow, fast = [0.1, 0.2, 0.3, 0.5], [0.1, 0.5, 0.3, 0.4]
    results = make_results(
        {"A_1": [make_run(slow, seed=s) for s in (0, 1)], "B": [make_run(fast, seed=s) for s in (0, 1)]}
    )
    text = tables.to_markdown(tables.tables_of(results, window=2)[0])
    assert "| policy | rounds to 50 % | rounds to 50 %, mean of 2 |" in text
    assert "| B | **2.0 ± 0.0** | N/A |" in text
    assert "| A_1 | 4.0 ± 0.0 | N/A |" in text


def test_csv_reads_back_as_numbers(accuracy_table):
    rows = list(csv.DictReader(io.StringIO(tables.to_csv(accuracy_table))))
    assert [row["policy"] for row in rows] == ["A_1", "B"]
    assert float(rows[0]["rounds to 50 %: mean"]) == 4.0
    assert rows[0]["rounds to 50 %, mean of 2: mean"] == ""
    assert rows[0]["rounds to 50 %, mean of 2: seeds"] == "0"


def test_latex_escapes_what_latex_would_take_amiss(accuracy_table):
    text = tables.to_latex(accuracy_table)
    assert r"A\_1 & 4.0" in text
    assert r"toy \& co" in text
    assert r"rounds to 50 \%" in text
    assert text.count("{") == text.count("}")


def test_markdown_shows_labels_as_they_are():
    table = tables.tables_of(make_results({"<k> a|b *c*": [make_run([0.1])]}))[0]
    assert r"| \<k> a\|b \*c\* |" in tables.to_markdown(table)


def test_latex_prints_labels_as_they_are():
    table = tables.tables_of(make_results({"d > 4 | n < 2": [make_run([0.1])], "[a] *": [make_run([0.1])]}))[0]
    lines = tables.to_latex(table).splitlines()
    assert any(line.startswith(r"d \textgreater{} 4 \textbar{} n \textless{} 2 &") for line in lines)
    assert any(line.startswith("{}[a] * &") for line in lines)  # the line break before it has no option


def test_terminal(accuracy_table):
    text = tables.to_text(accuracy_table)
    assert "toy & co: accuracy" in text
    assert "best accuracy %" in text


def test_unfinished_runs_are_named():
    results = make_results({"A": [make_run([0.5] * 2, wanted=4)]})
    assert results.incomplete == ["A, seed 0 (2 of 4 rounds)"]
    assert "Not finished: A, seed 0" in tables.tables_of(results)[0].note


def test_an_experiment_without_any_round_still_has_tables():
    results = make_results({"A": [make_run([], wanted=4)]})
    for table in tables.tables_of(results):
        for render in tables.FORMATS.values():
            assert "A" in render(table)


def with_objective(run, values):
    run.rounds["objective"] = np.array(values, float)
    return run


def test_rounds_to_a_loss_count_the_measured_rounds_only():
    run = with_objective(make_run([0.1, 0.2, 0.3, 0.4]), [np.nan, 0.9, np.nan, 0.7])
    assert analysis.rounds_to_loss(run, 0.9) == 2
    assert analysis.rounds_to_loss(run, 0.7) == 4
    assert analysis.rounds_to_loss(run, 0.69) is None


def test_loss_targets_have_a_column_with_the_same_rule_for_na():
    fast = [with_objective(make_run([0.1, 0.2], seed=seed), [0.9, 0.7 - seed]) for seed in (0, 1)]
    slow = [with_objective(make_run([0.1, 0.2], seed=seed), [0.9, 0.71 - seed]) for seed in (0, 1)]
    results = make_results({"fast": fast, "slow": slow}, targets=())
    results.experiment.spec["run"]["loss_targets"] = [0.7]
    table = tables.tables_of(results)[0]
    assert table.columns[0].heading == "rounds to loss 0.7"
    assert [cells[1] for cells in table.cells()] == ["2.0 ± 0.0", "N/A"]
    assert "rounds to loss 0.7" in tables.to_latex(table)


def test_paired_differences_pair_by_seed_and_equal_scipy():
    from scipy import stats

    base = [make_run([0.1, final], seed=seed, label="base") for seed, final in enumerate([0.5, 0.6, 0.9, 0.3])]
    better = [make_run([0.1, final], seed=seed) for seed, final in [(3, 0.35), (1, 0.62), (0, 0.53), (9, 0.0)]]
    results = make_results({"base": base, "better": better}, targets=(0.55,))
    found = analysis.paired_difference(results.policies[1], results.policies[0], analysis.final_accuracy)
    assert found.values == pytest.approx((0.05, 0.02, 0.03))
    expected = stats.ttest_rel([0.35, 0.62, 0.53], [0.3, 0.6, 0.5]).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high))
    table = tables.difference_table(results, "base")
    assert [label for label, _ in table.lines] == ["better"]
    cells = dict(zip((column.heading for column in table.columns), table.cells()[0][1:], strict=True))
    low, high = 100 * expected.low, 100 * expected.high
    assert cells["final accuracy %"] == f"+3.33 [{low:+.2f}, {high:+.2f}]"
    assert cells["rounds to 55 %"] == "N/A"
    row = next(csv.DictReader(io.StringIO(tables.to_csv(table))))
    assert float(row["final accuracy %: low"]) == pytest.approx(low)
    assert row["final accuracy %: seeds"] == "3"
    assert "pairs: 3" in tables.to_markdown(table)
    assert analysis.Difference((0.1,)).interval is None


def test_the_baseline_is_named_by_label_or_by_policy():
    results = make_results({"one": [make_run([0.1])]})
    assert analysis.policy_named(results, "uniform").label == "one"
    with pytest.raises(UnknownName, match="Did you mean 'one'"):
        tables.difference_table(results, "onee")
    two = make_results({"one": [make_run([0.1])], "two": [make_run([0.1])]})
    with pytest.raises(InvalidInput, match="by its label"):
        tables.difference_table(two, "uniform")


@pytest.mark.parametrize("text", ["t [/b] x", "[red]warm[/red]", "a :warning: b", "[link=x]"])
def test_titles_labels_headings_and_notes_are_text_never_markup(text):
    column = tables.Column(text, lambda run: None)
    drawn = tables.to_text(tables.Table(text, (column,), ((text, (Quantity((1.0,)),)),), text, corner=text))
    assert drawn.count(text) == 5


def test_a_search_marks_the_pair_that_it_chose():
    slow, fast = (Candidate(local_lr=rate, server_lr=None) for rate in (0.01, 0.1))
    choice = Choice(label="uniform", best=fast, scores=((slow, 0.4), (fast, 0.6)))
    table = tables.search_table("search", [choice], "note")
    assert table.best() == [str(fast)]
    assert f"| {fast} | **0.6000** |" in tables.to_markdown(table)
