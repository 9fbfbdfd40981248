"""The registry of policies: built-in ones, plug-ins of other packages, and import paths.

Built-ins are import paths, so listing them imports nothing and core does not depend on a policy. A package adds
plug-ins as entry points in the group `fedpick.policies`, with a namespace: `acme/greedy`. A plug-in that cannot be
imported is reported by `broken` and does not affect others. Any other policy is named by its import path,
`package.module:Class`.
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
    "herd": "fedpick.policies.herd:Herd",
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
    "oort": "fedpick.policies.oort:Oort",
    "fedau": "fedpick.policies.fedau:FedAU",
    "fedcbs": "fedpick.policies.fedcbs:FedCBS",
    "tifl": "fedpick.policies.tifl:TiFL",
    "refl": "fedpick.policies.refl:REFL",
    "clustered-size": "fedpick.policies.clustered:ClusteredSize",
    "clustered-updates": "fedpick.policies.clustered:ClusteredUpdates",
    "optimal-sampling": "fedpick.policies.optimal_sampling:OptimalSampling",
    "k-vib": "fedpick.policies.k_vib:KVib",
    "divfl": "fedpick.policies.divfl:DivFL",
    "hics": "fedpick.policies.hics:HiCS",
}


def _plugins() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if "/" not in entry.name or entry.name in found:
            continue  # reported by broken()
        found[entry.name] = entry
    return found


def names() -> tuple[str, ...]:
    """Return the names of all registered policies: built-ins first, then plug-ins."""
    return (*BUILT_IN, *sorted(_plugins()))


def broken() -> dict[str, str]:
    """Return the plug-ins that cannot be used, each with the reason in one sentence."""
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
    """Return the policy class that is registered under a name or found at an import path."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        built_in: type[Policy[Any]] = getattr(importlib.import_module(module), attribute)
        return built_in
    if is_import_path(name):
        return _policy_class(load_object("policy", name), f"The policy {name!r}")
    plugins = _plugins()
    if name not in plugins:
        hint = "installed plug-ins add names; `fedpick list policies` shows them all"
        raise unknown_name("policy", name, names(), hint)
    try:
        policy_class = plugins[name].load()
    except Exception as error:  # user code may raise anything
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
    known = _hyper_parameters(policy_class)
    for parameter in hyper_parameters:
        if parameter not in known:
            raise InvalidInput(str(unknown_name(f"hyper-parameter of {name!r}", parameter, known or ["(none)"])))
    preset = policy_class.variants.get(str(hyper_parameters.get("variant")), {})
    try:
        return policy_class(**{**preset, **hyper_parameters})
    except FedpickError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        given = ", ".join(f"{key}={repr(value)[:60]}" for key, value in hyper_parameters.items())
        raise InvalidInput(
            f"The policy {name!r} cannot be built with {given or 'its defaults'} ({type(error).__name__}: {error})."
        ) from error


def name_of(policy: Policy[Any]) -> str | None:
    """Return the registered name of a policy's class, or None."""
    wanted = f"{type(policy).__module__}:{type(policy).__qualname__}"
    for name, path in BUILT_IN.items():
        if path == wanted:
            return name  # finding plug-ins takes 10 ms: it reads the metadata of every installed package
    return next((name for name, entry in _plugins().items() if entry.value == wanted), None)


def parameters(policy: Policy[Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a policy by name."""
    return {name: getattr(policy, name) for name in _hyper_parameters(policy)}


def _hyper_parameters(policy: Any) -> list[str]:
    """Return the names of the hyper-parameters of a policy or of its class, which is a dataclass."""
    return [item.name for item in fields(policy) if item.init]


def summary(name: str) -> str:
    """Return the first line of the policy's docstring."""
    return (inspect.getdoc(load(name)) or "").partition("\n")[0]


def cite(*policies: Policy[Any] | str) -> str:
    """Return the BibTeX of policies, given as names or objects; each reference once.

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
