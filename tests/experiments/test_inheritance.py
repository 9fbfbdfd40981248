from __future__ import annotations

import pytest

from fedpick.experiments.inheritance import experiment_names, merge, resolve
from fedpick.experiments.spec import SpecError, load_spec, load_specs

BASE = """\
title = "base {variant}"
[data]
name = "digits"
[partition]
name = "shards"
shards_per_client = 3
num_clients = 10
holdout = 0.2
[task]
name = "logistic"
[local]
lr = { initial = 0.1, milestones = [5] }
steps = 5
[run]
rounds = 20
budget = 3
[[policies]]
name = "uniform"
[[policies]]
name = "pow-d"
label = "six"
num_candidates = 6
"""


@pytest.fixture
def write(tmp_path):
    """Write files beside each other; the path of the last one."""

    def write_files(**texts):
        for name, text in {"base": BASE, **texts}.items():
            (tmp_path / f"{name}.toml").write_text(text)
        return tmp_path / f"{[*texts, 'base'][0]}.toml"

    return write_files


def policies(spec):
    return {policy.label: dict(policy.parameters) for policy in spec.policies}


def test_tables_are_merged_key_by_key_along_the_chain(write):
    path = write(
        child='extends = "middle.toml"\n[run]\nrounds = 7\n',
        middle='extends = "base.toml"\ntitle = "middle"\nlocal.lr.initial = 0.3\nrun = { budget = 2, rounds = 9 }\n',
    )
    spec = load_spec(path)
    assert (spec.title, spec.rounds, spec.budget) == ("middle", 7, 2)
    assert spec.local == {"lr": {"initial": 0.3, "milestones": [5]}, "steps": 5}


def test_another_name_drops_the_options_of_the_old_one(write):
    spec = load_spec(write(child='extends = "base.toml"\npartition.name = "iid"\n'))
    assert spec.partition.to_dict() == {"name": "iid", "num_clients": 10, "holdout": 0.2}
    spec = load_spec(write(child='extends = "base.toml"\npartition.name = "shards"\n'))
    assert spec.partition.options["shards_per_client"] == 3
    assert merge({"data": {"name": "synthetic", "alpha": 1, "seed": 3}}, {"data": {"name": "digits"}}) == {
        "data": {"name": "digits", "seed": 3}
    }


def test_policies_are_adjusted_added_and_chosen_by_label(write):
    adjusted = load_spec(write(child='extends = "base.toml"\n[policies]\nsix.num_candidates = 7\nnew.name = "md"\n'))
    assert policies(adjusted) == {"uniform": {}, "six": {"num_candidates": 7}, "new": {}}
    chosen = load_spec(write(child='extends = "base.toml"\npolicies = ["six", { name = "md" }, "uniform"]\n'))
    assert policies(chosen) == {"six": {"num_candidates": 6}, "md": {}, "uniform": {}}
    anew = load_spec(write(child='extends = "base.toml"\n[[policies]]\nname = "md"\n'))
    assert policies(anew) == {"md": {}}


def test_every_variant_is_an_experiment(write):
    path = write(child='extends = "base.toml"\n[variants]\na.run.rounds = 3\n"b.1".run.budget = 1\n')
    first, second = load_specs(path)
    assert (first.title, first.rounds, first.budget) == ("base a", 3, 3)
    assert (second.title, second.rounds, second.budget) == ("base b.1", 20, 1)
    assert load_spec(path, "b.1") == load_spec(f"{path}#b.1") == second
    assert experiment_names(path) == [f"{path}#a", f"{path}#b.1"]
    assert experiment_names(path.with_name("base.toml")) == [str(path.with_name("base.toml"))]
    with pytest.raises(SpecError, match=r"The file holds 2 experiments. Choose one: .*child.toml#a"):
        load_spec(path)
    with pytest.raises(SpecError, match=r"There is no variant 'c'.*Known: a, b\.1"):
        load_spec(path, "c")


def test_extending_a_file_extends_its_variants_or_one_of_them(write):
    variants = BASE + "[variants.a]\nrun.rounds = 3\npolicies.six.num_candidates = 9\n[variants.b]\n"
    path = write(child='extends = "base.toml"\nrun.budget = 1\n[variants.a]\nrun.seeds = 4\n', base=variants)
    a, b = load_specs(path)
    assert (a.rounds, a.budget, len(a.seeds)) == (3, 1, 4)
    assert (b.rounds, b.budget, len(b.seeds)) == (20, 1, 1)
    # The policies of the file come after those of the variant that it extends.
    path = write(child='extends = "base.toml"\npolicies = ["six"]\n', base=variants)
    assert [policies(each)["six"]["num_candidates"] for each in load_specs(path)] == [9, 6]
    one = load_spec(write(child='extends = "base.toml#a"\n', base=variants))
    assert one.rounds == 3


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ('extends = "base.toml"\nrun.rounds = 0\n', "child.toml:2", "at least 1"),
        ('extends = "base.toml"\n[variants.a.run]\nround = 3\n', "child.toml:3", "Did you mean 'rounds'?"),
        ('extends = "base.toml"\n[policies.six]\nnum_candidats = 3\n', "child.toml:3", "mean 'num_candidates'?"),
        ('extends = "base.toml"\n[policies.sic]\nnum_candidates = 3\n', "child.toml:2", "Did you mean 'six'?"),
        ('extends = "base.toml"\npolicies = ["sic"]\n', "child.toml:2", "no inherited policy 'sic'. Did you"),
        ('extends = "base.toml"\nrun.budget = 2\n[partition]\nname = "2spc"\nshards_per_client = 3\n', "child.toml:5",
         "has no key 'shards_per_client'"),
        ('extends = "bas.toml"\n', "child.toml:1", "extends: there is no file"),
        ('extends = "base.toml#x"\n', "base.toml", "There is no variant 'x'"),
        ("extends = 3\n", "child.toml:1", "the path of a file"),
        ('extends = "base.toml"\nvariants = 3\n', "child.toml:2", "variants must be tables"),
        ('extends = "child.toml"\n', "child.toml", "in a circle: child.toml, which extends child.toml"),
    ],
)  # fmt: skip
def test_mistakes_name_the_file_and_the_line(write, tmp_path, text, where, says):
    with pytest.raises(SpecError) as caught:
        load_specs(write(child=text))
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / where}: ")


def test_a_mistake_of_the_base_names_the_base(write, tmp_path):
    base = BASE.replace("num_candidates = 6", "num_candidates = 0")
    with pytest.raises(SpecError) as caught:
        load_specs(write(child='extends = "base.toml"\npolicies = [{ name = "md" }, "six"]\n', base=base))
    assert str(caught.value).startswith(f"{tmp_path / 'base.toml'}:22: ")


def test_places_point_to_the_file_that_sets_a_key(write):
    (child,) = resolve(write(child='extends = "base.toml"\n[run]\nrounds = 7\n'))
    assert (child.places["run", "rounds"].line, child.places["run", "budget"].line) == (3, 16)
