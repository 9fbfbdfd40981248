from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from fedpick.core.guard import Guard, guard_of
from fedpick.experiments.settings import build_settings
from fedpick.experiments.spec import SpecError, load_spec, parse_spec
from fedpick.sim import Attacks
from tests.experiments.tiny import tiny_spec

GOOD = """\
title = "toy"
[data]
name = "digits"
[partition]
name = "2spc"
num_clients = 10
[task]
name = "logistic"
[local]
lr = { initial = 0.1, milestones = [150, 300] }
steps = 5
[run]
rounds = 20
budget = 3
seeds = 2
targets = [0.5, 0.9]
[[policies]]
name = "uniform"
[[policies]]
name = "md"
label = "MD"
local = { lr = 0.2 }
"""


def read(tmp_path: Path, text: str):
    file = tmp_path / "toy.toml"
    file.write_text(textwrap.dedent(text))
    return load_spec(file)


def refusal(tmp_path: Path, old: str, new: str, extra: str = "") -> str:
    assert old in GOOD
    with pytest.raises(SpecError) as caught:
        read(tmp_path, GOOD.replace(old, new, 1) + extra)
    return str(caught.value)


def test_a_good_spec_is_read_with_its_defaults(tmp_path):
    spec = read(tmp_path, GOOD)
    assert (spec.title, spec.rounds, spec.budget, spec.seeds) == ("toy", 20, 3, (0, 1))
    assert spec.evaluate_every == 1
    assert spec.targets == (0.5, 0.9)
    assert spec.availability.name == "ideal"
    assert [policy.label for policy in spec.policies] == ["uniform", "MD"]
    assert spec.settings_of(spec.policies[1], 0)["local"] == {"lr": 0.2, "steps": 5}


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('name = "uniform"', 'name = "unifrom"', 18, "Did you mean 'uniform'?"),
        ('name = "digits"', 'name = "digit"', 3, "Did you mean 'digits'?"),
        ("rounds = 20", "round = 20", 13, "Did you mean 'rounds'?"),
        ("rounds = 20", 'rounds = "20"', 13, "must be a whole number"),
        ("rounds = 20", "rounds = true", 13, "must be a whole number"),
        ("rounds = 20", "rounds = 0", 13, "at least 1"),
        ("steps = 5", "step = 5", 11, "Did you mean 'steps'?"),
        ("steps = 5", "steps = 0", 11, "must be a whole number of at least 1"),
        ("steps = 5", 'steps = 5\nsampling = "epok"', 12, "one of 'epoch', 'batch', 'replacement'"),
        ("milestones = [150, 300]", "milestone = [150, 300]", 10, "Did you mean 'milestones'?"),
        ("seeds = 2", "seeds = [1, 1]", 15, "once"),
        ("seeds = 2", "seeds = [-1]", 15, "at least 0"),
        ("targets = [0.5, 0.9]", "targets = [69]", 16, "(0, 1]"),
        ("budget = 3", "budget = 3\nevaluate_every = 21", 15, "evaluates none"),
        ("num_clients = 10", "holdout = 0.1", 4, "needs the key 'num_clients'"),
        ('label = "MD"', 'label = "uniform"', 19, "Two policies are called 'uniform'"),
        ('label = "MD"', "labl = 3", 21, "has no key 'labl'"),
        ("local = { lr = 0.2 }", "local = { lrr = 0.2 }", 22, "Did you mean 'lr'?"),
        ("[run]", "[rum]", 12, "Did you mean 'run'?"),
        ("num_clients = 10", "num_clients = 10\nholdout = nan", 7, "'holdout' must be finite. Got nan."),
        ("initial = 0.1", "initial = inf", 10, "'initial' must be finite"),
        ("local = { lr = 0.2 }", "local = { lr = -inf }", 22, "'lr' must be finite"),
    ],
)
def test_every_mistake_is_refused_with_its_line(tmp_path, old, new, line, says):
    message = refusal(tmp_path, old, new)
    assert says in message
    assert any(part.startswith(f"{tmp_path / 'toy.toml'}:{line}: ") for part in message.splitlines()), message


def test_broken_toml_names_the_line(tmp_path):
    assert ":13: not valid TOML" in refusal(tmp_path, "rounds = 20", "rounds = = 20")


def test_a_missing_file_and_missing_sections_are_said(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec(tmp_path / "absent.toml")
    with pytest.raises(SpecError, match=r"The section \[data\] is missing"):
        read(tmp_path, "[run]\nrounds = 3\n")


def test_all_mistakes_are_reported_at_once(tmp_path):
    message = refusal(tmp_path, "rounds = 20", "round = 20", extra='[[policies]]\nname = "mdd"\n')
    assert "'rounds'" in message
    assert "'md'" in message


def test_the_hash_ignores_how_things_are_written_but_nothing_that_matters(tmp_path):
    spec = read(tmp_path, GOOD)
    spelled = GOOD.replace("seeds = 2", "seeds = [0, 1]").replace("lr = 0.2", "lr = 0.20").replace("toy", "other")
    assert read(tmp_path, spelled).hash == spec.hash
    assert read(tmp_path, GOOD.replace("steps = 5", "steps = 6")).hash != spec.hash
    assert spec.override(rounds=21).hash != spec.hash


def test_numbers_that_are_not_finite_have_a_place_in_the_identity(tmp_path):
    def with_kappa(value):
        return read(tmp_path, GOOD + f'[[policies]]\nname = "ca-fed"\nkappa2 = {value}\n')

    infinite, large = with_kappa("inf"), with_kappa("1e9")
    assert infinite.policies[2].parameters["kappa2"] == float("inf")
    assert infinite.hash == with_kappa("+inf").hash != large.hash
    assert infinite.run_key(infinite.policies[2], 0) != large.run_key(large.policies[2], 0)
    unknown = read(tmp_path, GOOD + '[[policies]]\nname = "ca-fed"\nminimum_loss = [1.0, nan]\n')
    assert unknown.hash == read(tmp_path, GOOD + '[[policies]]\nname = "ca-fed"\nminimum_loss = [1, nan]\n').hash


def test_the_keys_of_runs_made_before_stay_the_same(tmp_path):
    spec = read(tmp_path, GOOD)
    assert spec.hash == "196f1daf85d4c16308618a13e10eff15e894c24a71f99796567ca699ce05a56f"
    assert spec.run_key(spec.policies[1], 1) == "bff42c8ac836d7e1d3a0b73fff72212765f75d0a11c5d36cdaab68e85764b076"


def test_a_run_is_identified_by_what_decides_its_rows(tmp_path):
    spec = read(tmp_path, GOOD)
    policy = spec.policies[0]
    longer = spec.override(rounds=40, targets=[0.1])
    assert longer.run_key(policy, 0) == spec.run_key(policy, 0)
    assert spec.run_key(policy, 1) != spec.run_key(policy, 0)
    assert spec.run_key(spec.policies[1], 0) != spec.run_key(policy, 0)
    other = read(tmp_path, GOOD.replace("budget = 3", "budget = 4"))
    assert other.run_key(policy, 0) != spec.run_key(policy, 0)


def test_overrides(tmp_path):
    spec = read(tmp_path, GOOD)
    assert spec.override(seeds=1).seeds == (0,)
    assert spec.override(seeds=4).seeds == (0, 1, 2, 3)
    assert spec.override(seeds=[7, 9]).seeds == (7, 9)
    for number in (0, -1):
        with pytest.raises(SpecError, match=f"1 to 10,000 seeds. Got {number}"):
            spec.override(seeds=number)
    assert [policy.name for policy in spec.override(only=["MD"]).policies] == ["md"]
    with pytest.raises(SpecError, match="Did you mean 'uniform'"):
        spec.override(only=["unifrm"])
    with pytest.raises(SpecError, match="at least 1"):
        spec.override(rounds=0)


def test_labels_do_without_commas_because_only_splits_at_them(tmp_path):
    assert "toy.toml:21: A label must do without commas" in refusal(tmp_path, '"MD"', '"MD, twice"')


def test_loss_targets_need_losses_and_stay_out_of_older_hashes(tmp_path):
    assert "set losses_every" in refusal(tmp_path, "budget = 3", "budget = 3\nloss_targets = [0.7]")
    assert "finite" in refusal(tmp_path, "budget = 3", "budget = 3\nlosses_every = 1\nloss_targets = [inf]")
    plain = read(tmp_path, GOOD)
    spec = read(tmp_path, GOOD.replace("budget = 3", "budget = 3\nlosses_every = 1\nloss_targets = [0.7]"))
    assert spec.loss_targets == (0.7,)
    assert spec.to_dict()["run"]["loss_targets"] == [0.7]
    assert not {"loss_targets", "validation_every"} & set(plain.to_dict()["run"])
    assert "validation_every" not in plain.settings_of(plain.policies[0], 0)
    validated = read(tmp_path, GOOD.replace("budget = 3", "budget = 3\nvalidation_every = 2"))
    assert validated.settings_of(validated.policies[0], 0)["validation_every"] == 2


def test_history_is_a_number_of_rounds(tmp_path):
    section = '[availability]\nname = "log-normal"\nhistory = {}\n[run]'
    spec = read(tmp_path, GOOD.replace("[run]", section.format(100)))
    assert spec.settings_of(spec.policies[0], 0)["availability"]["history"] == 100
    assert "at least 0" in refusal(tmp_path, "[run]", section.format(-1))
    assert "a whole number" in refusal(tmp_path, "[run]", section.format("'long'"))


def test_attacks_and_guard_enter_the_identity_only_where_they_are_given():
    plain = replace(tiny_spec(), guard="mild")
    content = plain.to_dict()
    assert "attacks" not in content
    assert "guard" not in content["run"]
    settings = plain.settings_of(plain.policies[0], 0)
    assert not {"attacks", "guard"} & set(settings)
    given = parse_spec({**content, "attacks": {"kind": "flip"}, "run": {**content["run"], "guard": "strict"}})
    assert given.hash != plain.hash
    told = given.settings_of(given.policies[0], 0)
    assert (told["attacks"], told["guard"]) == ({"kind": "flip"}, "strict")
    parts = build_settings(told)
    assert parts.attacks == Attacks(kind="flip")
    assert parts.guard == guard_of("strict")
    with pytest.raises(SpecError, match="inflate"):
        parse_spec({**content, "attacks": {"kind": "bribe"}})
    with pytest.raises(SpecError, match="guard"):
        parse_spec({**content, "run": {**content["run"], "guard": "severe"}})


def test_groups_and_options_of_the_guard_enter_the_identity_only_where_they_are_given():
    plain = replace(tiny_spec(), guard="mild")
    content = plain.to_dict()
    assert not {"groups", "guard"} & (set(content["run"]) | set(plain.settings_of(plain.policies[0], 0)))
    table = {"exclude": True, "most_places": 3.0}
    given = parse_spec({**content, "run": {**content["run"], "guard": table, "groups": [0, 1] * 12}})
    assert given.hash != plain.hash
    told = given.settings_of(given.policies[0], 0)
    assert (told["guard"], told["groups"]) == (table, [0, 1] * 12)
    assert parse_spec(given.to_dict()).hash == given.hash
    parts = build_settings(json.loads(json.dumps(told)))
    assert parts.guard == Guard(exclude=True, most_places=3.0)
    assert parts.groups == (0, 1) * 12


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("guard", "{ most_place = 3.0 }", "Did you mean 'most_places'"),
        ("guard", "{ most_places = 0.5 }", "at least 1"),
        ("groups", "'region'", "'cluster' or 'availability'"),
        ("groups", "0", "at least 1"),
        ("groups", "['a']", "a list of whole numbers"),
    ],
)
def test_wrong_groups_and_options_of_the_guard_are_refused(tmp_path, key, value, message):
    assert message in refusal(tmp_path, "[run]", f"[run]\n{key} = {value}")
