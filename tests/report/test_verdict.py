from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedpick.core.errors import UnknownName
from fedpick.report import analysis, tables
from fedpick.report.analysis import Difference, Quantity
from fedpick.report.groups import GroupAccount, Groups
from fedpick.report.verdict import verdict_of
from tests.report.test_tables import make_results, make_run, with_objective


def runs_of(finals, *, first_id=1, bytes_per_round=500, counts=(5, 5, 5, 5), wanted=None):
    """One run per seed with this final accuracy."""
    made = []
    for seed, final in enumerate(finals):
        run = make_run([0.1, final], seed=seed, counts=counts, wanted=wanted)
        run = dataclasses.replace(run, run=dataclasses.replace(run.run, id=first_id + seed))
        run.rounds["bytes_down"], run.rounds["bytes_up"] = np.array([1, 2]) * bytes_per_round, np.zeros(2)
        made.append(run)
    return made


def judge(policies, accounts=None, targets=(), **options):
    results = make_results(policies, targets=targets)
    results.experiment.spec["run"]["rounds"] = 2
    lines = [dataclasses.replace(line, policy=line.label) for line in results.policies]
    return verdict_of(dataclasses.replace(results, policies=tuple(lines)), accounts, **options)


UNIFORM = (0.70, 0.72, 0.71)
NOISY = (0.60, 0.90, 0.72)
BETTER = (0.75, 0.78, 0.76)
WORSE = (0.60, 0.61, 0.62)


def test_a_winner_is_named_with_its_interval_cost_and_who_pays():
    verdict = judge(
        {
            "uniform": runs_of(UNIFORM, bytes_per_round=1_000_000, counts=(5, 5, 5, 5)),
            "pow-d": runs_of(BETTER, first_id=10, bytes_per_round=2_500_000, counts=(1, 1, 9, 9)),
        }
    )
    gap = Difference((0.05, 0.06, 0.05))
    low, high = (100 * end for end in gap.interval)
    assert verdict.headline == (
        "pow-d is better than uniform: final accuracy 76.3 % instead of 71.0 %, +5.3 points "
        f"(95 % interval {low:+.1f} to {high:+.1f}), 3 seeds."
    )
    assert verdict.details == (
        "pow-d sends 5.00 MB in 2 rounds, 2.5 times uniform (2.00 MB).",
        "Who pays for it: under pow-d, the half of the clients chosen least often had 10 % of the places; "
        "under uniform, 50 %.",
    )
    assert verdict.sentences == (verdict.headline, *verdict.details)


def test_noise_is_a_tie_with_the_number_of_seeds_that_could_decide_it():
    verdict = judge({"uniform": runs_of(UNIFORM), "afl": runs_of(NOISY)})
    assert verdict.headline == (
        "No difference in final accuracy that these 3 seeds can show between uniform and afl: a tie."
    )
    assert "+3.0 points" in verdict.details[0]
    verdict = judge({"uniform": runs_of(UNIFORM), "afl": runs_of((0.75, 0.73, 0.73))})
    needed = Difference((0.05, 0.01, 0.02)).pairs_needed(100)
    assert f"About {needed - 3} more seeds would show it" in verdict.details[0]
    assert len(verdict.details) == 1


def test_the_seeds_needed_are_the_fewest_whose_interval_excludes_0():
    from scipy import stats

    gap = Difference((0.05, 0.01, 0.02))
    needed = gap.pairs_needed(100)

    def half(count):
        return stats.t.ppf(0.975, count - 1) * gap.sd / count**0.5

    assert half(needed) < gap.mean <= half(needed - 1)
    assert Difference((0.0, 0.0)).pairs_needed(100) is None
    assert Difference((1.0, -1.0, 0.001)).pairs_needed(100) is None
    assert Difference((1.0,)).pairs_needed(100) is None


def test_a_difference_too_small_to_find_says_so_and_equal_runs_are_the_same():
    verdict = judge({"uniform": runs_of(UNIFORM), "afl": runs_of((0.80, 0.62, 0.711))})
    assert "more than 100 seeds would be needed" in verdict.details[0]
    verdict = judge({"uniform": runs_of(UNIFORM), "md": runs_of(UNIFORM)})
    assert verdict.details == ("They are the same in every seed.",)


def test_differences_that_cancel_out_are_not_called_the_same():
    verdict = judge({"uniform": runs_of((0.5, 0.75)), "afl": runs_of((0.75, 0.5))})
    assert verdict.details[0].startswith("The clearest difference is that of afl: +0.0 points")


def test_a_difference_of_one_seed_has_no_interval_to_show():
    noisy = runs_of((0.80, 0.62, 0.711))
    verdict = judge({"uniform": runs_of(UNIFORM), "afl": noisy, "herd": runs_of((0.9,))})
    assert verdict.details[0].startswith("The clearest difference is that of afl: +0.0 points")
    assert "interval +0.0 to +0.0" not in " ".join(verdict.details)


def test_winners_that_are_tied_are_not_ranked_and_the_cheapest_is_told():
    verdict = judge(
        {
            "uniform": runs_of(UNIFORM),
            "pow-d": runs_of(BETTER, bytes_per_round=900),
            "herd": runs_of((0.76, 0.77, 0.755), bytes_per_round=500),
            "afl": runs_of(WORSE),
            "fedgs": runs_of(NOISY),
        }
    )
    assert verdict.headline.startswith("pow-d (+5.3 points")
    assert " and herd (+5.2 points" in verdict.headline
    assert verdict.headline.endswith(
        "are better than uniform in final accuracy. They are tied: these 3 seeds cannot tell them apart."
    )
    assert verdict.details[0] == "Of these, herd sends the fewest bytes."
    assert verdict.details[1] == "fedgs cannot be told from pow-d, nor from uniform, with these seeds."
    assert verdict.details[2].startswith("herd sends as many bytes as uniform")
    assert any(sentence.startswith("Worse than uniform: afl (-10.0 points") for sentence in verdict.details)
    assert verdict.details[-1] == (
        "4 policies are compared with uniform; by chance, 1 in 20 such intervals excludes 0."
    )


def test_nothing_better_than_uniform():
    verdict = judge({"uniform": runs_of(UNIFORM), "afl": runs_of(WORSE)})
    assert verdict.headline == "No policy is better than uniform in final accuracy: all others are worse."
    tie = judge({"uniform": runs_of(UNIFORM), "afl": runs_of(NOISY, bytes_per_round=50_000)})
    assert tie.details[-1] == "Of these, uniform sends the fewest bytes (1.00 kB), afl the most (100 kB)."


def test_bytes_that_a_loop_does_not_count_are_not_compared():
    won = judge({"uniform": runs_of(UNIFORM, bytes_per_round=0), "pow-d": runs_of(BETTER)})
    tied = judge({"uniform": runs_of(UNIFORM, bytes_per_round=0), "afl": runs_of(NOISY)})
    better = {"pow-d": runs_of(BETTER), "herd": runs_of((0.76, 0.77, 0.755), bytes_per_round=0)}
    both = judge({"uniform": runs_of(UNIFORM), **better})
    assert "bytes" not in " ".join((*won.details, *tied.details))
    assert "fewest" not in " ".join(both.details) and both.choice == "pow-d"


def test_one_seed_gives_no_verdict_and_neither_does_one_policy():
    verdict = judge({"uniform": runs_of(UNIFORM[:1]), "pow-d": runs_of(BETTER[:1])})
    assert verdict.headline.startswith("No verdict from one seed")
    assert "--seeds 3" in verdict.headline
    assert judge({"uniform": runs_of(UNIFORM)}).headline == "Only uniform has finished: final accuracy 71.0 %."
    assert judge({"uniform": []}).headline.startswith("No verdict yet")
    partly = runs_of(UNIFORM)
    partly[0].rounds["accuracy"][:] = np.nan
    assert judge({"uniform": partly}).headline == "Only uniform has finished: final accuracy N/A."


def test_runs_that_lack_rounds_do_not_count():
    verdict = judge({"uniform": runs_of(UNIFORM), "pow-d": [*runs_of(BETTER), *runs_of((0.1,), wanted=5)]})
    assert verdict.headline.startswith("pow-d is better than uniform: final accuracy 76.3 %")
    assert verdict.details[-1] == "1 run not finished: not counted here."


def test_the_headline_compares_the_seeds_that_both_policies_finished():
    more = runs_of((*UNIFORM, 0.5, 0.5, 0.5))
    more[-1].rounds["accuracy"][:] = np.nan
    verdict = judge({"uniform": more, "pow-d": runs_of(BETTER), "md": runs_of((*UNIFORM, 0.5, 0.51))})
    assert verdict.headline.startswith("pow-d is better than uniform: final accuracy 76.3 % instead of 71.0 %, +5.3")
    assert verdict.headline.endswith(", 3 seeds.")


def test_the_baseline_can_be_named_and_is_the_first_without_uniform():
    policies = {"md": runs_of(UNIFORM), "pow-d": runs_of(BETTER), "afl": runs_of(WORSE)}
    assert judge(policies).headline.startswith("pow-d is better than md")
    assert judge(policies, against="afl").headline.startswith("pow-d is better than afl")
    with pytest.raises(UnknownName):
        judge(policies, against="nosuch")
    begun = {**policies, "herd": runs_of(BETTER, wanted=5)}
    assert judge(begun, against="herd").headline == "No verdict yet: no run of herd has finished."


def test_without_a_test_set_the_loss_decides_and_low_is_better():
    def losses(values):
        made = []
        for run, value in zip(runs_of([np.nan] * 3), values, strict=True):
            run.rounds["accuracy"][:] = run.rounds["loss"][:] = np.nan
            made.append(with_objective(run, [9.0, value]))
        return made

    verdict = judge({"uniform": losses((3.0, 3.1, 3.2)), "pow-d": losses((2.0, 2.15, 2.1))})
    assert verdict.headline.startswith(
        "pow-d is better than uniform: final loss of all clients 2.083 instead of 3.1, -1.02 (95 % interval -1."
    )


def test_the_cost_of_a_target_is_compared_in_pairs():
    verdict = judge({"uniform": runs_of(UNIFORM), "pow-d": runs_of(BETTER)}, targets=(0.05, 0.5, 0.9))
    assert "To reach 50 %, pow-d sends 1.00 kB, uniform 1.00 kB, a difference that these seeds cannot show." in (
        verdict.details
    )


def accounts_of(runs, realized, *, by="availability"):
    """Accounts of four groups with the targets 0.3, 0.2, 0.4, 0.1."""
    names = tuple(
        f"{much} available, {how}" for much in ("less", "more") for how in ("correlated", "weakly correlated")
    )
    if by == "cluster":
        names = ("cluster 0", "cluster 1", "cluster 2", "cluster 3")
    groups = Groups(by, names, np.arange(4), np.zeros(4))
    return {
        run.run.id: GroupAccount(
            groups=groups,
            target=dict(zip(names, (0.3, 0.2, 0.4, 0.1), strict=True)),
            realized=dict(zip(names, shares, strict=True)),
            excluded={},
            left_out={},
            cumulative=np.array([shares]),
            distance=np.zeros(1),
            chi_square=None,
        )
        for run, shares in zip(runs, realized, strict=True)
    }


def test_the_group_that_lacks_most_of_its_weight_is_told():
    uniform, better = runs_of(UNIFORM), runs_of(BETTER, first_id=10)
    shares = [(0.1, 0.1, 0.6, 0.2), (0.12, 0.1, 0.58, 0.2), (0.11, 0.09, 0.6, 0.2)]
    even = accounts_of(uniform, [(0.25, 0.15, 0.45, 0.15)] * 3)
    verdict = judge({"uniform": uniform, "ca-fed": better}, {**even, **accounts_of(better, shares)})
    assert verdict.details[-1] == (
        "Who pays for it: less available clients get 21 % of the weight instead of 50 %, their share of the examples "
        "(under uniform: 40 %)."
    )
    clustered = accounts_of(better, shares, by="cluster")
    verdict = judge({"uniform": uniform, "ca-fed": better}, clustered)
    assert "clients of cluster 0 get 11 % of the weight instead of 30 %" in verdict.details[-1]
    fair = accounts_of(better, [(0.3, 0.2, 0.4, 0.1)] * 3)
    verdict = judge({"uniform": uniform, "ca-fed": better}, fair)
    assert verdict.details[-1].startswith("No group of clients pays for it")
    noisy = accounts_of(better, [(0.0, 0.0, 0.9, 0.1), (0.3, 0.2, 0.4, 0.1), (0.3, 0.0, 0.6, 0.1)])
    verdict = judge({"uniform": uniform, "ca-fed": better}, noisy)
    assert verdict.details[-1] == (
        "Who pays for it is not shown with these seeds: less available clients get 27 % of the weight instead of 50 %, "
        "their share of the examples."
    )


# Ties in tables


def table_of(policies):
    return tables.tables_of(make_results(policies))[0]


def test_a_table_marks_no_winner_on_noise():
    tie = table_of({"uniform": runs_of(UNIFORM), "afl": runs_of(NOISY)})
    assert set(tie.best()) == {None}
    assert "**" not in tables.to_markdown(tie).replace(f"**{tie.title}**", "")
    assert "textbf" not in tables.to_latex(tie)
    assert "a column without bold is a tie" in tie.note
    won = table_of({"uniform": runs_of(UNIFORM), "pow-d": runs_of(BETTER)})
    assert won.best()[[column.heading for column in won.columns].index("final accuracy %")] == "pow-d"
    alone = table_of({"uniform": runs_of(UNIFORM[:1]), "pow-d": runs_of(BETTER[:1])})
    assert set(alone.best()) == {None}


def test_a_table_pairs_no_runs_of_different_seeds():
    later = [
        dataclasses.replace(run, run=dataclasses.replace(run.run, seed=run.run.seed + 1)) for run in runs_of(BETTER)
    ]
    assert set(table_of({"uniform": runs_of(UNIFORM), "pow-d": later}).best()) == {None}


def test_leaders_are_the_best_and_all_that_it_does_not_beat():
    quantities = {
        "a": Quantity((1.0, 2.0, 3.0)),
        "b": Quantity((1.1, 2.1, 3.1)),
        "c": Quantity((0.0, 4.0, 2.5)),
        "never": Quantity((1.0, None, 1.0)),
    }
    assert analysis.leaders(quantities, "high") == ["c", "a", "b"]
    assert analysis.leaders({key: quantities[key] for key in "ab"}, "high") == ["b"]
    assert analysis.leaders({key: quantities[key] for key in "ab"}, "low") == ["a"]
    assert analysis.leaders({key: quantities[key] for key in "bc"}, "low") == ["b", "c"]
    assert analysis.leaders({"a": quantities["a"]}, "high") == []
    assert analysis.leaders({"a": Quantity((1.0,)), "b": Quantity((2.0,))}, "high") == ["b", "a"]
