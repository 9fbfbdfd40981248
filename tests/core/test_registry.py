from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

import fedpick
from fedpick.core import registry
from fedpick.core.errors import InvalidInput, UnknownName


@dataclass(frozen=True, kw_only=True)
class NotAPolicy:
    pass


def plugins(monkeypatch, **targets):
    entries = [
        EntryPoint(name.replace("__", "/"), target, registry.ENTRY_POINT_GROUP) for name, target in targets.items()
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)


def test_a_wrong_name_suggests_the_right_one():
    with pytest.raises(UnknownName, match="Did you mean 'uniform'"):
        fedpick.policies.get("unifrom")


def test_a_wrong_hyper_parameter_suggests_the_right_one():
    with pytest.raises(InvalidInput, match="Did you mean 'weighting'"):
        fedpick.policies.get("uniform", weigthing="equal")


def test_a_bad_value_is_refused_at_construction():
    with pytest.raises(InvalidInput, match=r"'weighting' parameter of Uniform must be .* Got 'size' instead"):
        fedpick.policies.get("uniform", weighting="size")


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_policy_is_built_without_arguments_documented_and_cited(name):
    policy = fedpick.policies.get(name)
    assert registry.name_of(policy) == name
    assert len(registry.summary(name)) > 10
    assert fedpick.cite(policy).startswith("@")
    assert isinstance(policy.needs, frozenset)


def test_each_reference_is_cited_once():
    assert fedpick.cite("uniform", "uniform", "md").count("@inproceedings") == 2


def test_plug_ins_are_found_and_broken_ones_break_nothing(monkeypatch):
    plugins(
        monkeypatch,
        acme__good="fedpick.policies.uniform:Uniform",
        acme__gone="no_such_module:Policy",
        acme__odd="tests.core.test_registry:NotAPolicy",
        bare="fedpick.policies.uniform:Uniform",
    )
    assert {"acme/good", "acme/gone", "acme/odd"} <= set(fedpick.policies.names())
    assert "bare" not in fedpick.policies.names()
    assert fedpick.policies.get("acme/good", weighting="equal").weighting == "equal"
    reasons = registry.broken()
    assert set(reasons) == {"acme/gone", "acme/odd", "bare"}
    assert "cannot be imported: ModuleNotFoundError" in reasons["acme/gone"]
    assert "namespace" in reasons["bare"]
    with pytest.raises(InvalidInput, match="cannot be imported"):
        fedpick.policies.get("acme/gone")
    fedpick.policies.get("md")


def test_a_class_of_ones_own_goes_by_module_and_name():
    policy = fedpick.policies.get("fedpick.policies.uniform:Uniform", weighting="equal")
    assert policy == fedpick.policies.get("uniform", weighting="equal")
    with pytest.raises(
        InvalidInput, match=r"'tests.core.test_registry:NotAPolicy' is not a subclass of fedpick.Policy"
    ):
        fedpick.policies.get("tests.core.test_registry:NotAPolicy")
    with pytest.raises(UnknownName, match="Did you mean 'Uniform'"):
        fedpick.policies.get("fedpick.policies.uniform:Unifrom")
    with pytest.raises(InvalidInput, match=r"hyper-parameter of .* named 'weigting'"):
        fedpick.policies.get("fedpick.policies.uniform:Uniform", weigting="equal")


def test_two_packages_with_one_name_are_reported(monkeypatch):
    entries = [EntryPoint("a/b", f"{module}:Uniform", registry.ENTRY_POINT_GROUP) for module in ("one", "two")]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    assert "two packages claim it" in registry.broken()["a/b"]


def test_the_name_of_a_built_in_policy_needs_no_metadata_of_packages(monkeypatch):
    """Reading it took 10 ms in every Session.save."""
    monkeypatch.setattr(registry, "entry_points", None)
    assert registry.name_of(registry.get("afl")) == "afl"
