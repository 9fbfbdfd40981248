"""Values of a spec, checked by the real things they are given to, before any data are read."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from types import ModuleType

import pytest

pytest.importorskip("jax")

from fedpick import data
from fedpick.data import loading, sources
from fedpick.data.partition import OWN_CLIENTS, dealer_class
from fedpick.experiments.spec import SpecError, load_spec, parse_spec
from fedpick.experiments.validation import content_problems
from fedpick.sim import tasks

BAD = """\
[data]
name = "synthetic"
num_clients = 0
alpha = -1.0
seed = -3
[partition]
name = "dirichlet-class"
num_clients = 0
holdout = 2
alpha = -1
[task]
name = "logistic"
ridge = -1.0
[local]
lr = 0.1
steps = 0
[simulator]
shards = 0
noise_examples = -1
[availability]
name = "log-normal"
beta = 7
seed = -1
history = -2
[run]
rounds = 2
budget = 0
[[policies]]
name = "ca-fed"
kappa2 = -1.0
tau = -1.0
"""


def refused(tmp_path, text):
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "bad.toml")
    return caught.value


def test_all_wrong_values_are_said_at_once_each_with_its_line(tmp_path):
    lines = BAD.splitlines()
    wrong = ("num_clients", "alpha", "seed", "holdout", "ridge", "steps", "shards", "noise_examples", "beta", "history",
             "budget", "kappa2", "tau")  # fmt: skip
    expected = [number for number, line in enumerate(lines, start=1) if line.split(" ")[0] in wrong]
    error = refused(tmp_path, BAD)
    assert [line for line, _ in error.problems] == expected
    for line, text in error.problems:
        key, _, value = lines[line - 1].partition(" = ")
        assert key in text
        assert f"Got {value}" in text or f"{key}={value}" in text


def test_options_that_are_wrong_together_name_their_section_or_the_one_at_fault(tmp_path):
    good = BAD.replace("num_clients = 0", "num_clients = 5").replace("alpha = -1.0\nseed = -3\n", "")
    good = good.replace("holdout = 2\nalpha = -1", "holdout = 0.1\nsplit = [0.8, 0.1, 0.1]")
    found = dict(refused(tmp_path, good).problems)
    assert "Give holdout or split, not both." in found[4]
    clustered = BAD.replace("dirichlet-class", "clustered").replace("alpha = -1\n", "num_clusters = 6\n")
    clustered = clustered.replace("num_clients = 0", "num_clients = 5").replace("holdout = 2\n", "")
    found = dict(refused(tmp_path, clustered).problems)
    assert "between 1 and the number of clients, 5. Got 6" in found[9]


def test_a_typo_is_said_without_waiting_for_what_values_need(tmp_path):
    (tmp_path / "bad.toml").write_text(BAD.replace('"log-normal"', '"lognormal"').replace("synthetic", "digits"))
    program = (
        "import sys\nfrom fedpick.experiments.spec import load_spec\n"
        "try:\n    load_spec('bad.toml')\nexcept ValueError as error:\n"
        "    print(\"Did you mean 'log-normal'\" in str(error), 'jax' in sys.modules, 'sklearn' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]


def problems(section, **table):
    """The problems of one section in a spec that is good otherwise."""
    content = {
        "data": {"name": "digits"}, "partition": {"name": "iid", "num_clients": 100}, "task": {"name": "logistic"},
        "local": {"lr": 0.1, "steps": 1}, "run": {"rounds": 1}, "policies": [{"name": "uniform"}],
    }  # fmt: skip
    return "\n".join(problem.message for problem in content_problems({**content, section: table}))


@pytest.mark.parametrize("name", data.names())
def test_checking_a_data_set_reads_and_draws_nothing(name, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a check must not come this far")

    monkeypatch.setattr(sources, "_look", forbidden)
    monkeypatch.setattr(inspect.getmodule(loading.options_source(name)), "Dataset", forbidden)
    assert not problems("data", name=name)
    assert not problems("data", name=name, seed=3)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("synthetic", {"sizes": "x"}, "'sizes' must be one of 'lognormal', 'power-law'"),
        ("synthetic", {"sizes": "power-law", "size_spread": 0.5}, "larger than 1"),
        ("synthetic", {"test_fraction": 1.0}, "test_fraction"),
        ("synthetic", {"num_classes": 1}, "num_classes"),
        ("leaf-synthetic", {"cluster_shares": [0.5, 0.6], "num_clusters": 2}, "cluster_shares"),
        ("quadratic", {"dimension": 0}, "dimension"),
        ("quadratic", {"curvature": [1.0]}, "must be two numbers"),
        ("digits", {"test_fraction": -0.1}, "test_fraction"),
        ("fmnist", {"normalization": "cifar"}, "normalization"),
        ("cifar10", {"normalization": "half"}, None),
        ("sentiment140", {"min_tweets": 0}, "min_tweets"),
        ("sentiment140", {"dimension": 60}, "GloVe"),
    ],
)
def test_options_of_data_sets(name, options, says):
    found = problems("data", name=name, **options)
    assert found.count("\n") == 0
    assert says in found if says else not found


@pytest.mark.parametrize("name", data.partition_names())
def test_the_defaults_of_every_partition_pass(name):
    clients = {} if name in OWN_CLIENTS else {"num_clients": 100}
    given = {"path": "clients.csv"} if name == "table" else {}
    own = given or {
        item.name: item.default for item in fields(dealer_class(name)) if item.init and item.default is not None
    }
    assert not problems("partition", name=name, **clients, **own)
    assert not problems("partition", name=name, **clients, **own, holdout=0.2)
    assert "split must be three shares" in problems("partition", name=name, **clients, **given, split=[0.5, 0.6, 0.1])


def test_options_of_partitions():
    assert "shards_per_client" in problems("partition", name="shards", num_clients=100, shards_per_client=0)
    # Only the data can tell.
    assert not problems("partition", name="shards", num_clients=100, shards_per_client=10**12)
    for name in ("dirichlet-qp", "dirichlet-lognormal", "dirichlet-class", "clustered"):
        assert "alpha" in problems("partition", name=name, num_clients=100, alpha=0.0)
        assert not problems("partition", name=name, num_clients=100, alpha=1e-9)
    assert not problems("partition", name="dirichlet-class", num_clients=1_000_000, min_examples=10_000)


@pytest.mark.parametrize("name", tasks.names())
def test_the_defaults_of_every_task_pass(name):
    assert not problems("task", name=name)
    assert "has no key 'input_shape'" in problems("task", name=name, input_shape=[3])


def test_functions_of_users_are_not_called_to_check_them(monkeypatch):
    module = ModuleType("module_of_a_user")
    module.make = lambda **options: pytest.fail("called")
    monkeypatch.setitem(sys.modules, "module_of_a_user", module)
    assert not problems("data", name="module_of_a_user:make", anything=1)
    assert not problems("task", name="module_of_a_user:make", anything=1)


def test_values_are_refused_without_a_file_too():
    content = {
        "data": {"name": "digits"}, "partition": {"name": "iid", "num_clients": 0}, "task": {"name": "logistic"},
        "local": {"lr": 0.1, "steps": 1}, "run": {"rounds": 1}, "policies": [{"name": "uniform"}],
    }  # fmt: skip
    with pytest.raises(SpecError, match=r"spec: \[partition\] iid: .* num_clients"):
        parse_spec(content)


@pytest.mark.parametrize(
    ("section", "table", "problem"),
    [
        ("devices", {"name": "phone"}, "There is no model of devices named 'phone'. Did you mean 'phones'?"),
        ("devices", {"name": "phones", "speed": 1}, "[devices] phones has no key 'speed'"),
        ("devices", {"name": "phones", "seconds_per_example": 0}, "must be a finite number larger than 0. Got 0"),
        ("devices", {"name": "lognormal", "upload": -1.0}, "must be a finite number larger than 0. Got -1.0"),
        ("waiting", {"quorum": 0.8}, "[waiting] needs a clock: add the section [devices]"),
        ("availability", {"name": "ideal", "clock": True}, "clock = true needs device logs"),
    ],
)
def test_sections_about_time(section, table, problem):
    from fedpick.experiments.validation import content_problems
    from tests.experiments.tiny import tiny_spec

    content = {**tiny_spec().to_dict(), section: table}
    assert any(problem in each.message for each in content_problems(content)), content_problems(content)


def test_sketches_of_updates():
    assert not problems("simulator", sketch="count-sketch")
    assert not problems("simulator", sketch="head", update_length=64)
    assert "'sketch' parameter of SimulatorSettings must be 'head', 'count-sketch'" in problems(
        "simulator", sketch="bias"
    )
    assert "sketch" in problems("simulator", sketch=0.5)
    assert "update_length" in problems("simulator", update_length=0)
