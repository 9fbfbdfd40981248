"""Names -> policies: the built-in ones, and those that other packages add as entry points in `fedpick.policies`.

Built-ins are known as strings only, so that listing them imports nothing and core never depends on a policy.
A plug-in's names carry its namespace, `acme/greedy`; a plug-in that cannot be imported is reported and breaks no other.
A policy of one's own that is no plug-in goes by `package.module:Class`.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fedpick.core.errors import FedpickError, InvalidInput, unknown_name
from fedpick.core.imports import is_import_path, load_object
from fedpick.core.policy import Policy

__all__ = ["BUILT_IN", "broken", "cite", "get", "load", "name_of", "names", "parameters", "summary"]

ENTRY_POINT_GROUP = "fedpick.policies"

BUILT_IN: dict[str, str] = {
    "uniform": "fedpick.policies.uniform:Uniform",
    "md": "fedpick.policies.md:MD",
    "pow-d": "fedpick.policies.pow_d:PowD",
    "cpow-d": "fedpick.policies.pow_d:CPowD",
    "rpow-d": "fedpick.policies.pow_d:RPowD",
    "adapow-d": "fedpick.policies.pow_d:AdaPowD",
    "afl": "fedpick.policies.afl:AFL",
    "fedcor": "fedpick.policies.fedcor:FedCor",
    "fedgp": "fedpick.policies.fedcor:FedGP",
    "fedgs": "fedpick.policies.fedgs:FedGS",
    "ca-fed": "fedpick.policies.ca_fed:CAFed",
    "unbiased": "fedpick.policies.unbiased:Unbiased",
    "more-available": "fedpick.policies.more_available:MoreAvailable",
    "adafed": "fedpick.policies.adafed:AdaFed",
    "f3ast": "fedpick.policies.f3ast:F3AST",
}


def _plugins() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if "/" not in entry.name or entry.name in found:
            continue  # reported by broken()
        found[entry.name] = entry
    return found


def names() -> tuple[str, ...]:
    """Every registered policy: built-ins first, then plug-ins."""
    return (*BUILT_IN, *sorted(_plugins()))


def broken() -> dict[str, str]:
    """Plug-ins that cannot be used, with the reason in one sentence."""
    reasons: dict[str, str] = {}
    seen: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if "/" not in entry.name:
            reasons[entry.name] = f"its name needs a namespace, such as 'acme/{entry.name}'"
        elif entry.name in seen:
            reasons[entry.name] = f"two packages claim it: {seen[entry.name].value} and {entry.value}"
        else:
            seen[entry.name] = entry
            try:
                load(entry.name)
            except FedpickError as error:
                reasons[entry.name] = str(error)
    return reasons


def load(name: str) -> type[Policy[Any]]:
    """The class behind a name, or behind `package.module:Class`."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    if is_import_path(name):
        return _policy_class(load_object("policy", name), f"The policy {name!r}")
    plugins = _plugins()
    if name not in plugins:
        hint = "installed plug-ins add names; `fedpick list policies` shows them all"
        raise unknown_name("policy", name, names(), hint)
    try:
        policy_class = plugins[name].load()
    except Exception as error:  # somebody else's import may fail in any way
        raise InvalidInput(
            f"The plug-in policy {name!r} ({plugins[name].value}) cannot be imported: {type(error).__name__}: {error}."
        ) from error
    return _policy_class(policy_class, f"The plug-in policy {name!r} ({plugins[name].value})")


def _policy_class(found: Any, what: str) -> type[Policy[Any]]:
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        raise InvalidInput(f"{what} is not a subclass of fedpick.Policy.")
    return found


def get(name: str, **hyper_parameters: Any) -> Policy[Any]:
    """Build a policy by name. Every policy can be built with no hyper-parameters.

    If the class names `variants`, `variant=...` starts from the values of that one instead of the defaults.
    """
    policy_class = load(name)
    known = [item.name for item in fields(policy_class) if item.init]  # type: ignore[arg-type]
    for parameter in hyper_parameters:
        if parameter not in known:
            raise InvalidInput(str(unknown_name(f"hyper-parameter of {name!r}", parameter, known or ["(none)"])))
    preset = policy_class.variants.get(str(hyper_parameters.get("variant")), {})
    return policy_class(**{**preset, **hyper_parameters})


def name_of(policy: Policy[Any]) -> str | None:
    """The registered name of a policy's class, or None for a class that was never registered."""
    wanted = f"{type(policy).__module__}:{type(policy).__qualname__}"
    candidates = [*BUILT_IN.items(), *((name, entry.value) for name, entry in _plugins().items())]
    named = [name for name, target in candidates if target == wanted]
    return named[0] if named else None


def parameters(policy: Policy[Any]) -> dict[str, Any]:
    """The hyper-parameters of a policy, by name."""
    return {item.name: getattr(policy, item.name) for item in fields(policy) if item.init}  # type: ignore[arg-type]


def summary(name: str) -> str:
    """One line on what a policy does: the first line of its docstring."""
    return (inspect.getdoc(load(name)) or "").partition("\n")[0]


def cite(*policies: Policy[Any] | str) -> str:
    """BibTeX for these policies, each reference once; names and policies both work.

    >>> print(cite("md").splitlines()[0])
    @inproceedings{li2020convergence,
    """
    references: list[str] = []
    for policy in policies:
        policy_class = load(policy) if isinstance(policy, str) else type(policy)
        reference = inspect.cleandoc(policy_class.reference)
        if reference and reference not in references:
            references.append(reference)
    return "\n\n".join(references)
