"""Values of a spec, checked by the real things they are given to, before any data are read."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

pytest.importorskip("jax")

from fedpick import data
from fedpick.core.errors import InvalidInput
from fedpick.data import sources
from fedpick.data.partition import dealer_of
from fedpick.experiments.spec import SpecError, load_spec, parse_spec
from fedpick.experiments.values import check_data, check_partition, check_task
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


@pytest.mark.parametrize("name", data.names())
def test_checking_a_data_set_reads_and_draws_nothing(name, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a check must not come this far")

    monkeypatch.setattr(sources, "_look", forbidden)
    module = inspect.getmodule(data.registry.loader_of(name))
    monkeypatch.setattr(module, "Dataset", forbidden)
    check_data(name)
    if "seed" in inspect.signature(data.registry.loader_of(name)).parameters:
        check_data(name, seed=3)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("synthetic", {"sizes": "x"}, None),  # looked at after the first draw: refused when the run is built
        ("synthetic", {"test_fraction": 1.0}, "test_fraction"),
        ("synthetic", {"num_classes": 1}, "num_classes"),
        ("leaf-synthetic", {"cluster_shares": [0.5, 0.6], "num_clusters": 2}, "cluster_shares"),
        ("quadratic", {"dimension": 0}, "dimension"),
        ("digits", {"test_fraction": -0.1}, "test_fraction"),
        ("fmnist", {"normalization": "cifar"}, "normalization"),
        ("cifar10", {"normalization": "half"}, None),
        ("sentiment140", {"min_tweets": 0}, "min_tweets"),
        ("sentiment140", {"dimension": 60}, "GloVe"),
    ],
)
def test_options_of_data_sets(name, options, says):
    if says is None:
        check_data(name, **options)
        return
    with pytest.raises(InvalidInput, match=says):
        check_data(name, **options)


@pytest.mark.parametrize("name", data.partition_names())
def test_the_defaults_of_every_partition_pass(name):
    clients = {} if name == "natural" else {"num_clients": 100}
    dealer = dealer_of(name)
    function = getattr(dealer, "func", dealer)
    fixed = set(getattr(dealer, "keywords", {}))
    own = {
        each.name: each.default
        for each in inspect.signature(function).parameters.values()
        if each.kind is each.KEYWORD_ONLY and each.name not in fixed and each.default is not None
    }
    check_partition(name, **clients, **own)
    check_partition(name, **clients, **own, holdout=0.2)
    with pytest.raises(InvalidInput, match="split must be three shares"):
        check_partition(name, **clients, split=[0.5, 0.6, 0.1])


def test_options_of_partitions():
    for options, says in [
        ({"shards_per_client": 0}, "shards_per_client"),
        ({"shards_per_client": 10**12}, None),  # only the data can tell
    ]:
        if says is None:
            check_partition("shards", num_clients=100, **options)
        else:
            with pytest.raises(InvalidInput, match=says):
                check_partition("shards", num_clients=100, **options)
    for name in ("dirichlet-qp", "dirichlet-lognormal", "dirichlet-class", "clustered"):
        with pytest.raises(InvalidInput, match="alpha"):
            check_partition(name, num_clients=100, alpha=0.0)
        check_partition(name, num_clients=100, alpha=1e-9)
    check_partition("dirichlet-class", num_clients=1_000_000, min_examples=10_000)


@pytest.mark.parametrize("name", tasks.names())
def test_the_defaults_of_every_task_pass(name):
    check_task(name)


def test_somebodys_own_functions_are_not_called_to_check_them():
    check_data("no.such.module:function", anything=1)
    check_task("no.such.module:function", anything=1)


def test_values_are_refused_without_a_file_too():
    content = {
        "data": {"name": "digits"}, "partition": {"name": "iid", "num_clients": 0}, "task": {"name": "logistic"},
        "local": {"lr": 0.1, "steps": 1}, "run": {"rounds": 1}, "policies": [{"name": "uniform"}],
    }  # fmt: skip
    with pytest.raises(SpecError, match=r"spec: \[partition\] iid: .* num_clients"):
        parse_spec(content)
