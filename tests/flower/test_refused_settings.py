"""What cannot work is refused by with_policy, with a sentence that says what to do, before any client trains."""

from __future__ import annotations

import json
import logging
import os

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedpick[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

import fedpick
from fedpick.core.errors import InvalidInput, MissingSignal, StateFileError
from fedpick.flower import with_policy
from tests.flower.fake_grid import FakeGrid, FakeNode, federation, start

logging.getLogger("flwr").setLevel(logging.ERROR)

UNIFORM = fedpick.policies.get("uniform")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("FedAvg", r"strategy must be a Flower strategy object.*Got 'FedAvg'"),
        (flower.FedAvg, r"FedAvg is a class.*FedAvg\(\.\.\.\)"),
        (None, "strategy must be a Flower strategy object"),
        (UNIFORM, "strategy must be a Flower strategy object"),
        (with_policy(flower.FedAvg(), UNIFORM), "already has a policy"),
    ],
    ids=["name", "class", "none", "policy", "twice"],
)
def test_a_strategy_is_a_strategy(strategy, message):
    with pytest.raises(InvalidInput, match=message):
        with_policy(strategy, UNIFORM)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("pow-d", r"fedpick\.policies\.get\('pow-d'\)"),
        (type(UNIFORM), r"Uniform is a class.*Uniform\(\)"),
        (None, r"fedpick\.policies\.get\('uniform'\)"),
        (flower.FedAvg(), "policy must be a policy object"),
    ],
    ids=["name", "class", "none", "strategy"],
)
def test_a_policy_is_a_policy(policy, message):
    with pytest.raises(InvalidInput, match=message):
        with_policy(flower.FedAvg(), policy)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("budget", value) for value in (2.5, 0, -1, "3", True, float("nan"))),
        *(("min_clients", value) for value in (1.5, -1, None, "2")),
        *(("wait", value) for value in (None, "60", -1.0, float("nan"), True)),
        *(("probe_timeout", value) for value in (None, "60", -1.0, float("nan"), [1])),
        *(("train_timeout", value) for value in (None, "60", -1.0, float("nan"))),
        *(("progress", value) for value in ("print", 3, [])),
        *(("key", value) for value in ("site", 3, {})),
        *(("seed", value) for value in (-1, 1.5, None)),
        *(("weights", value) for value in ("examples", None, ["policy"])),
        *(("reports", value) for value in ("loss", None, {"accuracy": "acc"}, {"loss": 3}, ["loss"])),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_by_name(setting, value):
    with pytest.raises(InvalidInput, match=rf"^(The '{setting}' parameter of with_policy|{setting}) must .*Got "):
        with_policy(flower.FedAvg(), UNIFORM, **{setting: value})


def test_settings_that_can_be_used_are_not_refused():
    with_policy(
        flower.FedAvg(),
        UNIFORM,
        budget=np.int64(3),
        min_clients=0,
        wait=0,
        probe_timeout=np.float64(1),
        train_timeout=float("inf"),
        reports={},
    )


@pytest.mark.parametrize("timeout", ["60", -1.0, float("nan")])
def test_a_timeout_given_at_the_start_is_checked_too(timeout):
    grid = federation(2)
    with pytest.raises(InvalidInput, match=r"^timeout must"):
        with_policy(flower.FedAvg(), UNIFORM).start(
            grid=grid, initial_arrays=ArrayRecord({"w": Array(np.zeros(1))}), num_rounds=1, timeout=timeout
        )
    assert grid.sent == []


@pytest.mark.parametrize("state", [3, True, "", b"policy", "bad\0name"], ids=repr)
def test_a_state_is_a_path(state, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=r"^state must"):
        with_policy(flower.FedAvg(), UNIFORM, state=state)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_a_file_or_below_one_is_refused(tmp_path):
    file = tmp_path / "policy"
    file.write_text("mine")
    for state in (file, str(file), file / "below"):
        with pytest.raises(InvalidInput, match=r"state must be a directory that can be written.*policy.*another"):
            with_policy(flower.FedAvg(), UNIFORM, state=state)
    assert file.read_text() == "mine"


def test_a_state_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    if os.geteuid() == 0:  # nothing is forbidden to root

        def read_only(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    else:
        tmp_path.chmod(0o500)
    with pytest.raises(InvalidInput, match=r"can be written.*Permission denied"):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)


def test_a_state_is_made_and_left_empty_until_the_first_round(tmp_path):
    strategy = with_policy(flower.FedAvg(), UNIFORM, state=tmp_path / "runs" / "policy", budget=2)
    assert list((tmp_path / "runs" / "policy").iterdir()) == []
    start(strategy, federation(3), rounds=1)
    assert (tmp_path / "runs" / "policy" / "session.json").exists()


@pytest.mark.parametrize("name", ["session.json", "roster.json"])
def test_somebody_elses_files_are_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(StateFileError, match=name):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    assert (tmp_path / name).read_text() == '{"mine": 1}'


def test_a_roster_that_does_not_fit_the_session_is_refused(tmp_path):
    start(with_policy(flower.FedAvg(), UNIFORM, state=tmp_path), federation(3), rounds=1)
    rows = json.loads((tmp_path / "roster.json").read_text())
    (tmp_path / "roster.json").write_text(json.dumps({**rows, "keys": rows["keys"][:1]}))
    with pytest.raises(StateFileError, match="damaged"):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    shorter = {name: value[:1] if isinstance(value, list) else value for name, value in rows.items()}
    (tmp_path / "roster.json").write_text(json.dumps(shorter))
    with pytest.raises(StateFileError, match=r"1 clients.*3"):
        with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)


def test_a_saved_roster_with_nonsense_in_it_is_read_without(tmp_path):
    start(with_policy(flower.FedAvg(), UNIFORM, state=tmp_path), federation(3), rounds=1)
    rows = json.loads((tmp_path / "roster.json").read_text())
    rows["histograms"] = [[1.0, float("nan")], [1.0, 2.0], [-1.0, 2.0]]
    rows["num_examples"] = [10.0, float("inf"), None]
    (tmp_path / "roster.json").write_text(json.dumps(rows))
    (tmp_path / "roster.json.4711.partial").write_text("a crash left this")
    (tmp_path / "roster.json.mine.partial").write_text("not this")
    strategy = with_policy(flower.FedAvg(), UNIFORM, state=tmp_path)
    assert strategy.roster.clients().label_histogram.tolist() == [[1, 2]] * 3
    assert strategy.roster.clients().num_examples.tolist() == [10, 10, 10]
    start(strategy, federation(3), rounds=1)
    assert [file.name for file in tmp_path.glob("*.partial")] == ["roster.json.mine.partial"]


@pytest.mark.parametrize(
    ("policy", "signal"),
    [
        (fedpick.policies.get("fedgs", similarity="outputs"), "outputs"),
        (fedpick.policies.get("fedgs", similarity="features"), "features"),
        (fedpick.policies.get("ca-fed", estimates="oracle"), "availability"),
        (fedpick.policies.get("unbiased", estimates="oracle"), "availability"),
    ],
    ids=["outputs", "features", "ca-fed", "unbiased"],
)
def test_what_no_flower_client_can_tell_is_refused(policy, signal):
    with pytest.raises(MissingSignal, match=rf"{type(policy).__name__} needs .*{signal}.*Flower"):
        with_policy(flower.FedAvg(), policy)


@pytest.mark.parametrize("name", fedpick.policies.names())
def test_every_policy_as_it_comes_is_accepted(name):
    with_policy(flower.FedAvg(), fedpick.policies.get(name))


def test_a_strategy_without_a_key_for_weights_is_refused_before_anybody_trains():
    class Own(Strategy):
        configure_train = configure_evaluate = aggregate_train = aggregate_evaluate = summary = None

    with pytest.raises(InvalidInput, match=r"weighted_by_key(.|\n)*weights=\"ignored\""):
        with_policy(Own(), UNIFORM)
    with_policy(Own(), UNIFORM, weights="ignored")


def test_a_strategy_whose_model_has_no_updates_is_refused():
    for weights in ("policy", "ignored"):
        with pytest.raises(InvalidInput, match="FedXgbBagging"):
            with_policy(flower.FedXgbBagging(), UNIFORM, weights=weights)


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


def keyed(function, grid, rounds=1):
    strategy = with_policy(flower.FedAvg(fraction_evaluate=0.0), UNIFORM, key=function)
    start(strategy, grid, rounds=rounds)
    return strategy


@pytest.mark.parametrize("nothing", [None, ""])
def test_a_node_for_which_there_is_no_key_is_known_by_its_node_id(nothing, caplog):
    grid = FakeGrid({10: FakeNode(0), 11: FakeNode(1), 12: FakeNode(2)})
    strategy = keyed(lambda node, facts: nothing if node.node_id > 10 else "site", grid)
    assert strategy.roster.keys == ["key:site", "node:11", "node:12"]
    assert len(strategy.history[0].clients) == 3
    assert caplog.text.count("The key function gave") == 2


def test_a_key_function_that_raises_costs_only_that_nodes_key(caplog):
    def by_site(node, facts):
        return {10: "a", 11: "b"}[node.node_id]

    strategy = keyed(by_site, FakeGrid({10: FakeNode(0), 11: FakeNode(1), 12: FakeNode(2)}), rounds=2)
    assert strategy.roster.keys == ["key:a", "key:b", "node:12"]
    assert caplog.text.count("The key function failed for node 12") == 1


def test_nodes_that_the_key_function_cannot_tell_apart_are_known_by_their_node_ids(caplog):
    grid = FakeGrid({10: FakeNode(0), 11: FakeNode(1), 12: FakeNode(2)})
    strategy = keyed(lambda node, facts: "same" if node.node_id != 10 else "other", grid)
    assert strategy.roster.keys == ["key:other", "node:11", "node:12"]
    grid.nodes[13] = FakeNode(3)  # too late to be seen beside the others, but the value is known to be worth nothing
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys[-1] == "node:13"
    assert [len(selection.clients) for selection in strategy.history] == [3, 4]
    assert caplog.text.count("The key function gives 'same' to several nodes") == 1


def test_a_restarted_node_keeps_its_key():
    grid = FakeGrid({10: FakeNode(0), 11: FakeNode(1)})
    strategy = keyed(lambda node, facts: f"site-{facts['partition-id']}", grid)
    grid.nodes[99] = grid.nodes.pop(11)
    start(strategy, grid, rounds=1)
    assert strategy.roster.keys == ["key:site-0", "key:site-1"]
    assert strategy.roster.node_of == {0: 10, 1: 99}


def test_a_round_is_not_asked_of_a_policy_without_anybody(tmp_path):
    strategy = with_policy(flower.FedAvg(), UNIFORM, wait=0.0)
    assert strategy.configure_train(1, ArrayRecord({"w": Array(np.zeros(1))}), ConfigRecord(), FakeGrid({})) == []
