"""Specs and device logs with random damage."""

import json
import pickle
import tomllib

import numpy as np

from fedpick.availability.logs import Replay, read_logs
from fedpick.core.types import Clients
from fedpick.experiments.spec import load_specs, parse_spec
from tests.fuzz.damage import both_half, changed_tree, damaged, pick, survives

SPEC = """
title = "a"
[data]
name = "synthetic"
[partition]
name = "natural"
holdout = 0.2
[task]
name = "logistic"
[local]
lr = { initial = 0.005, milestones = [150, 300] }
epochs = 3
batch_size = 64
[server]
momentum = 0.5
[availability]
name = "log-normal"
beta = 0.5
history = 3
[faults]
dropout = 0.1
[run]
rounds = 500
budget = 5
seeds = [1, 2, 3]
targets = [0.69]
[[policies]]
name = "fedcor"
label = "FedCor"
warmup = 15
local = { lr = 0.01 }
[[policies]]
name = "ca-fed"
[variants.small]
run.rounds = 10
"""


@both_half
def test_damaged_spec_files(tmp_path, cases):
    file = tmp_path / "spec.toml"

    def case(rng):
        file.write_bytes(damaged(SPEC.encode(), rng))
        for spec in load_specs(file):
            assert spec.hash

    assert survives(case, cases, seed=4) > cases // 3


@both_half
def test_specs_with_odd_values(cases):
    content = tomllib.loads(SPEC)
    del content["variants"]

    def case(rng):
        odd = changed_tree(changed_tree(content, rng), rng)
        if isinstance(odd, dict):
            assert parse_spec(odd).hash

    assert survives(case, cases, seed=5) > cases // 3


@both_half
def test_deeply_nested_toml(tmp_path, cases):
    file = tmp_path / "spec.toml"

    def case(rng):
        depth = int(10 ** rng.uniform(1, 4))
        begin, end = pick(rng, [("[", "]"), ("{a=", "}")])
        inner = f"a = {begin * depth}1{end * depth}\n" if rng.random() < 0.5 else f"[{'a.' * depth}a]\n"
        file.write_text(SPEC + inner)
        load_specs(file)

    assert survives(case, min(cases, 200), seed=6) == min(cases, 200)


def log_files(directory):
    arrays = {"offsets": np.array([0, 2, 4]), "t": np.array([0, 50, 10, 90_000]), "state": np.array([2, 0, 1, 2])}
    np.savez(directory / "a.npz", **arrays)
    (directory / "a.csv").write_text("client,time,state\na,0,2\na,50,0\nb,10.5,2\nb,90000,1\n")
    messages = "2020-01-28 18:00:00\tbattery_charged_on\n2020-01-28 19:00:00\twifi\n2020-01-29 19:00:00\tscreen_lock"
    (directory / "a.json").write_text(json.dumps({"1": {"messages": messages}, "2": {"messages": messages}}))
    record = {"duration": 9, "inactive": [60, 200], "finish_time": 90_000, "active": [1, 90], "model": "x"}
    (directory / "a.pkl").write_bytes(pickle.dumps({1: record, 2: record}))
    return [directory / f"a.{ending}" for ending in ("npz", "csv", "json", "pkl")]


@both_half
def test_damaged_logs(tmp_path, cases):
    contents = [(file.suffix, file.read_bytes()) for file in log_files(tmp_path)]
    clients = Clients(num_examples=np.ones(5))

    def case(rng):
        suffix, content = pick(rng, contents)
        file = tmp_path / f"damaged{suffix}"
        file.write_bytes(damaged(content, rng))
        read_logs(file)
        trace = Replay(path=str(file)).start(clients, 0)
        assert trace.mask(int(rng.integers(1000))).shape == (5,)

    assert survives(case, cases, seed=7) > cases // 3


@both_half
def test_odd_json_logs(tmp_path, cases):
    file = tmp_path / "log.json"
    log_files(tmp_path)
    content = json.loads((tmp_path / "a.json").read_text())

    def case(rng):
        file.write_text(json.dumps(changed_tree(content, rng), default=str))
        read_logs(file)

    assert survives(case, cases, seed=8) > cases // 3
