"""Round reports."""

from __future__ import annotations

import pytest
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.flower import with_policy
from tests.flower.fake_grid import UNIFORM, federation, start


def test_progress_is_told_when_the_cohort_is_chosen_and_when_the_round_is_over():
    grid, reports = federation(5), []
    strategy = with_policy(
        flower.FedAvg(fraction_evaluate=0.0),
        fedpick.policies.get("pow-d", num_candidates=5),
        budget=2,
        progress=reports.append,
        probe_timeout=11.0,
        train_timeout=22.0,
    )
    # Power-of-Choice takes those with the largest loss, which are 3 and 4; the latter fails.
    grid.on_send = lambda message: [
        setattr(node, "mode", "late" if message.metadata.message_type == "train" and node.partition == 4 else "good")
        for node in grid.nodes.values()
    ]
    start(strategy, grid, rounds=2)
    chosen, over, chosen_later, _ = reports
    assert not chosen.over and over.over and chosen.round == over.round == 1
    assert chosen.available == over.available == [f"partition:{i}" for i in range(5)]
    assert sorted(chosen.cohort) == ["partition:3", "partition:4"]
    assert (over.completed, over.failed) == (["partition:3"], ["partition:4"])
    steps = [(step.kind, step.asked, step.answered, step.deadline) for step in over.steps]
    described = [("query.fedpick", 1, 1, 2.75), ("query.fedpick", 4, 4, 11.0)]
    assert steps == [*described, ("query.fedpick", 5, 5, 11.0), ("train", 2, 1, 22.0)]
    assert over.seconds >= sum(step.seconds for step in over.steps)
    assert chosen_later.round == 2


def test_a_listener_that_raises_does_not_end_the_federation(caplog):
    seen = []

    def listener(report):
        seen.append(report)
        raise RuntimeError("the disk is full")

    strategy = with_policy(flower.FedAvg(), UNIFORM, budget=2, progress=listener)
    start(strategy, federation(3), rounds=2)
    assert strategy.session.round == 2
    assert [report.over for report in seen] == [False, True, False, True]
    assert "the disk is full" in caplog.text and "progress" in caplog.text


def test_a_listener_can_still_be_interrupted():
    def listener(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(with_policy(flower.FedAvg(), UNIFORM, progress=listener), federation(3), rounds=1)
