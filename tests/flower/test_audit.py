"""The audit log of a federation: it holds what was decided, and it outlives the server."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.adapter.audit import check
from fedpick.core.errors import InvalidInput, StateFileError
from fedpick.flower import legacy, with_policy
from tests.flower import test_legacy as older
from tests.flower.fake_grid import UNIFORM, alter, federation, node_of, start, with_metric, with_targets


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_round_can_be_decided_again_from_its_lines(tmp_path):
    path, policy = tmp_path / "audit.jsonl", fedpick.policies.get("pow-d", num_candidates=4)
    strategy = with_policy(flower.FedAvg(), policy, budget=2, seed=3, audit=path)
    grid = federation(6)
    node_of(grid, 5).mode = "error"
    start(strategy, grid, rounds=3)
    rows = lines_of(path)
    assert [row["kind"] for row in rows] == ["open", "members", *["choice", "outcome"] * 3]
    opened, members, *rounds = rows
    assert opened["policy"] == "pow-d" and opened["seed"] == 3 and opened["parameters"]["num_candidates"] == 4
    assert {change["identity"] for change in members["changes"]} >= {f"partition:{k}" for k in range(5)}
    names = strategy.roster.keys
    session = fedpick.Session(policy, strategy.session.table, 3)
    for choice, outcome, made in zip(rounds[::2], rounds[1::2], strategy.history, strict=True):
        (asked,) = choice["reports"]
        known = dict(zip(asked["clients"], asked["values"], strict=True))
        measure = lambda probe, known=known: np.array([known[names[k]] for k in probe.clients], dtype=float)  # noqa: E731
        mask = np.array([name in choice["available"] for name in names])
        again = session.ask(available=mask, budget=choice["budget"], measure=measure)
        assert [names[k] for k in again.clients] == choice["cohort"] == [names[k] for k in made.clients]
        assert choice["diagnostics"] == dict(made.diagnostics)
        assert outcome["cohort"] == choice["cohort"] and sum(outcome["weights"]) == pytest.approx(1)
        session.tell(
            fedpick.Outcome(index=session.round, clients=again.clients, completed=np.array(outcome["completed"]))
        )


def test_the_log_continues_after_a_restart_and_refuses_what_was_changed(tmp_path):
    path = tmp_path / "audit.jsonl"
    for _ in range(2):
        strategy = with_policy(flower.FedAvg(), UNIFORM, budget=2, audit=path, state=tmp_path / "s")
        start(strategy, federation(3), rounds=2)
    assert [row.get("next_round") for row in lines_of(path) if row["kind"] == "open"] == [1, 3]
    assert [row["round"] for row in lines_of(path) if row["kind"] == "outcome"] == [1, 2, 3, 4]
    assert not check(path).sentence
    assert with_policy(flower.FedAvg(), UNIFORM, audit=path)._driver._audit is strategy._driver._audit  # one chain
    del strategy
    path.write_text(path.read_text().replace("partition:1", "partition:0", 1))
    with pytest.raises(StateFileError, match="Line 2 is broken"):
        with_policy(flower.FedAvg(), UNIFORM, audit=path)
    for wrong in (7, "", tmp_path):
        with pytest.raises(InvalidInput, match="audit must be the path of a file"):
            with_policy(flower.FedAvg(), UNIFORM, audit=wrong)


def test_refused_and_excluded_nodes_are_in_the_log(tmp_path):
    path, grid = tmp_path / "audit.jsonl", federation(3)
    grid.nodes[20_000] = type(node_of(grid, 2))(2)
    start(with_policy(flower.FedAvg(), UNIFORM, audit=path, exclude=["partition:1"]), grid, rounds=1)
    (members,) = [row for row in lines_of(path) if row["kind"] == "members"]
    found = {(change["identity"], change["status"]) for change in members["changes"]}
    assert {("partition:1", "excluded"), ("partition:2", "refused"), ("partition:2", "member")} <= found


def test_the_older_api_writes_the_same_log(tmp_path):
    path = tmp_path / "audit.jsonl"
    older.start(legacy.with_policy(older.fedavg(), UNIFORM, budget=2, audit=path), older.clients(4), rounds=2)
    assert [row["kind"] for row in lines_of(path)] == ["open", "members", *["choice", "outcome"] * 2]


def test_the_guard_in_force_and_what_it_did_are_in_the_log_with_names(tmp_path):
    path, recent = tmp_path / "audit.jsonl", fedpick.policies.get("rpow-d")
    for guard in ("mild", "strict"):
        grid = with_targets(8)
        for node in grid.nodes.values():
            alter(node, "train", with_metric("train_loss", 1e4 if node.partition == 3 else 1.0))
        options = {"guard": guard, "audit": path, "state": tmp_path / guard}
        for budget in (8, 7):
            strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), recent, budget=budget, **options)
            start(strategy, grid, rounds=1)
    restarted = with_policy(flower.FedAvg(), recent, guard="strict", audit=path, state=tmp_path / "mild")
    rows = lines_of(path)
    assert [row["guard"]["exclude"] for row in rows if row["kind"] == "open"] == [False, False, True, True, True]
    assert restarted.session.guard.exclude
    choices, outcomes = ([row for row in rows if row["kind"] == kind] for kind in ("choice", "outcome"))
    assert [row["refused"] for row in outcomes] == [[], [], ["partition:3"], []]
    assert [row["notes"].get("lost_credibility") for row in outcomes] == [["partition:3"], None] * 2
    assert [row["diagnostics"].get("distrusted") for row in choices] == [None, ["partition:3"]] * 2
    assert outcomes[2]["completed"].count(False) == 1 and not check(path).sentence
