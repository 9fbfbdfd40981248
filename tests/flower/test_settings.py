"""Settings that cannot work are refused by with_policy, with what to do, before any client trains."""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.adapter.settings import REPORTS, Options, Settings
from fedpick.core.errors import InvalidInput, MissingSignal
from fedpick.flower import with_policy
from tests.flower.fake_grid import UNIFORM, federation, start


def test_what_flower_cannot_report_is_refused_before_the_first_round():
    with pytest.raises(MissingSignal, match="outputs"):
        with_policy(flower.FedAvg(), fedpick.policies.get("fedgs", similarity="outputs"), budget=2)


def test_reports_that_are_no_outcome_are_refused():
    with pytest.raises(InvalidInput, match="reports must map"):
        with_policy(flower.FedAvg(), fedpick.policies.get("uniform"), reports={"accuracy": "acc"})


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ({}, REPORTS),
        (REPORTS, REPORTS),
        ({"eval_loss": "x"}, {**REPORTS, "eval_loss": "x"}),
        ({"eval_loss": "loss"}, {**REPORTS, "eval_loss": "loss"}),
        (
            {"train_loss": "loss"},
            {"train_loss": "loss", "loss_rms": "loss_rms", "duration": "train-time", "eval_loss": "eval_loss"},
        ),
    ],
)
def test_reports_that_are_not_named_keep_their_usual_metrics(reports, expected):
    assert Settings(reports=reports).reports == expected


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
        *(("budget", value) for value in (2.5, 0, -1, "3", True, float("nan"), 1.0, 0.0, -0.5)),
        *(("probe", value) for value in ("loss", None, True)),
        *(("min_clients", value) for value in (1.5, -1, None, "2")),
        *(("wait", value) for value in (None, "60", -1.0, float("nan"), True)),
        *(("probe_timeout", value) for value in (None, "60", -1.0, float("nan"), [1])),
        *(("train_timeout", value) for value in (None, "60", -1.0, float("nan"))),
        *(("progress", value) for value in ("print", 3, [])),
        *(("key", value) for value in ("site", 3, {})),
        *(("sketch", value) for value in ("bias", None, 512, ["head"])),
        *(("seed", value) for value in (-1, 1.5, None)),
        *(("weights", value) for value in ("examples", None, ["policy"])),
        *(("record", value) for value in ("results.sqlite", 3)),
        *(("exclude", value) for value in ("partition:1", ["clinic"], 3, None)),
        *(("clip_norms", value) for value in (0.0, -1, float("nan"), "2")),
        *(("cooldown", value) for value in (-1, 1.5, None)),
        *(("max_share", value) for value in (0.0, 1.5, "half")),
        *(("quorum", value) for value in (0.0, 1.2, None)),
        *(("overcommit", value) for value in (0.9, float("inf"), "1.3")),
        *(("eligible", value) for value in ("name:a", 3, [], ["clinic-a"], [7], {"name:a", "b"})),
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
    with pytest.raises(InvalidInput, match=r"^The 'timeout' parameter of start must"):
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


@pytest.mark.parametrize(
    ("budget", "size"), [(0.25, 3), (np.float32(0.5), 6), (0.01, 1), (0.99, 12), (4, 4), (None, 12)]
)
def test_a_budget_may_be_a_fraction_of_the_ready_clients(budget, size):
    strategy = with_policy(flower.FedAvg(), UNIFORM, budget=budget)
    start(strategy, federation(12), rounds=2)
    assert [len(selection.clients) for selection in strategy.history] == [size, size]


def test_the_options_of_both_apis_are_written_once():
    """Their names and types are in Options, their defaults in Settings."""
    own = {"path", "probe", "caller", "log"}
    assert {field.name for field in fields(Settings)} - own == set(Options.__annotations__)
    described = re.findall(r"^ {4}(\w+): ", inspect.getdoc(with_policy).partition("options:")[2], re.MULTILINE)
    assert set(described) == set(Options.__annotations__)
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "flower.md").read_text()
    assert all(f"\n| `{name}` |" in guide for name in Options.__annotations__)
