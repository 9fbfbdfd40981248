"""Written by scripts/policies_stub.py. Do not edit."""

from collections.abc import Sequence
from typing import Any, Literal, overload

from fedpick.core.policy import Policy
from fedpick.policies.adafed import AdaFed
from fedpick.policies.afl import AFL
from fedpick.policies.ca_fed import CAFed
from fedpick.policies.clustered import ClusteredSize, ClusteredUpdates
from fedpick.policies.divfl import DivFL
from fedpick.policies.f3ast import F3AST
from fedpick.policies.fedau import FedAU
from fedpick.policies.fedcbs import FedCBS
from fedpick.policies.fedcor import FedCor, FedGP
from fedpick.policies.fedgs import FedGS
from fedpick.policies.herd import Herd
from fedpick.policies.hics import HiCS
from fedpick.policies.k_vib import KVib
from fedpick.policies.md import MD
from fedpick.policies.more_available import MoreAvailable
from fedpick.policies.oort import Oort
from fedpick.policies.optimal_sampling import OptimalSampling
from fedpick.policies.pow_d import AdaPowD, CPowD, PowD, RPowD
from fedpick.policies.refl import REFL
from fedpick.policies.tifl import TiFL
from fedpick.policies.unbiased import Unbiased
from fedpick.policies.uniform import Uniform

__all__ = [
    "AFL",
    "F3AST",
    "MD",
    "REFL",
    "AdaFed",
    "AdaPowD",
    "CAFed",
    "CPowD",
    "ClusteredSize",
    "ClusteredUpdates",
    "DivFL",
    "FedAU",
    "FedCBS",
    "FedCor",
    "FedGP",
    "FedGS",
    "Herd",
    "HiCS",
    "KVib",
    "MoreAvailable",
    "Oort",
    "OptimalSampling",
    "PowD",
    "RPowD",
    "TiFL",
    "Unbiased",
    "Uniform",
    "get",
    "names",
]

@overload
def get(
    name: Literal["herd"],
    *,
    alpha: float = ...,
    fade: float = ...,
    source: str = ...,
    swaps: bool = ...,
) -> Herd: ...
@overload
def get(
    name: Literal["uniform"],
    *,
    weighting: str = ...,
) -> Uniform: ...
@overload
def get(
    name: Literal["md"],
) -> MD: ...
@overload
def get(
    name: Literal["pow-d"],
    *,
    num_candidates: int | Literal["all"] | None = ...,
    first_round: Literal["candidates", "uniform"] = ...,
) -> PowD: ...
@overload
def get(
    name: Literal["cpow-d"],
    *,
    num_candidates: int | Literal["all"] | None = ...,
    batch_size: int = ...,
    first_round: Literal["candidates", "uniform"] = ...,
) -> CPowD: ...
@overload
def get(
    name: Literal["rpow-d"],
    *,
    num_candidates: int | Literal["all"] | None = ...,
    first_round: Literal["candidates", "uniform"] = ...,
) -> RPowD: ...
@overload
def get(
    name: Literal["adapow-d"],
    *,
    num_candidates: int | Literal["all"] | None = ...,
    halve_every: int | None = ...,
    drop_at: int | None = ...,
    first_round: Literal["candidates", "uniform"] = ...,
) -> AdaPowD: ...
@overload
def get(
    name: Literal["afl"],
    *,
    alpha1: float = ...,
    alpha2: float = ...,
    alpha3: float = ...,
    value: Literal["loss-sqrt-n", "loss"] = ...,
    unseen: Literal["explore", "probe"] = ...,
    report: Literal["loss", "train-loss"] = ...,
) -> AFL: ...
@overload
def get(
    name: Literal["fedcor"],
    *,
    dimension: int = ...,
    warmup: int = ...,
    interval: int = ...,
    beta: float = ...,
    history: int = ...,
    theta: float = ...,
    trials: int = ...,
    noise: float = ...,
    variant: str = ...,
    rule: str = ...,
    updates: str = ...,
    initial_scale: float = ...,
    learning_rate: float = ...,
    iterations: int = ...,
    warmup_iterations: int = ...,
    warmup_training: str = ...,
    warmup_history: int = ...,
    history_unit: str = ...,
    sample_from: int = ...,
    prior_mean: str = ...,
    selection_noise: str = ...,
    schedule: str = ...,
    anneal_warmup: bool = ...,
) -> FedCor: ...
@overload
def get(
    name: Literal["fedgp"],
    *,
    dimension: int = ...,
    warmup: int = ...,
    interval: int = ...,
    beta: float = ...,
    history: int = ...,
    theta: float = ...,
    trials: int = ...,
    noise: float = ...,
    variant: str = ...,
    rule: str = ...,
    updates: str = ...,
    initial_scale: float = ...,
    learning_rate: float = ...,
    iterations: int = ...,
    warmup_iterations: int = ...,
    warmup_training: str = ...,
    warmup_history: int = ...,
    history_unit: str = ...,
    sample_from: int = ...,
    prior_mean: str = ...,
    selection_noise: str = ...,
    schedule: str = ...,
    anneal_warmup: bool = ...,
) -> FedGP: ...
@overload
def get(
    name: Literal["fedgs"],
    *,
    alpha: float = ...,
    epsilon: float = ...,
    sigma2: float = ...,
    similarity: str = ...,
    objective: str = ...,
    graph: str = ...,
    max_prototypes: int = ...,
) -> FedGS: ...
@overload
def get(
    name: Literal["ca-fed"],
    *,
    kappa2: float = ...,
    tau: float = ...,
    smoothing: float = ...,
    estimates: str = ...,
    prior: float = ...,
    batch_size: int | None = ...,
    minimum_loss: str | Sequence[float] = ...,
    unmeasured: str = ...,
) -> CAFed: ...
@overload
def get(
    name: Literal["unbiased"],
    *,
    estimates: str = ...,
    prior: float = ...,
) -> Unbiased: ...
@overload
def get(
    name: Literal["more-available"],
    *,
    estimates: str = ...,
    prior: float = ...,
) -> MoreAvailable: ...
@overload
def get(
    name: Literal["adafed"],
    *,
    estimates: str = ...,
    prior: float = ...,
    normalize_over: str = ...,
) -> AdaFed: ...
@overload
def get(
    name: Literal["f3ast"],
    *,
    estimates: str = ...,
    prior: float = ...,
    cohort_size: int | None = ...,
) -> F3AST: ...
@overload
def get(
    name: Literal["oort"],
    *,
    exploration: float = ...,
    decay: float = ...,
    least_exploration: float = ...,
    clip: float = ...,
    cutoff: float = ...,
    percentile: float = ...,
    pacer_step: float = ...,
    pacer_rounds: int = ...,
    penalty: float = ...,
    weighting: Literal["examples", "equal"] = ...,
) -> Oort: ...
@overload
def get(
    name: Literal["fedau"],
    *,
    cutoff: int | None = ...,
    weighting: Literal["equal", "importance"] = ...,
) -> FedAU: ...
@overload
def get(
    name: Literal["fedcbs"],
    *,
    exploration: float = ...,
    power: float = ...,
) -> FedCBS: ...
@overload
def get(
    name: Literal["tifl"],
    *,
    tiers: int = ...,
    interval: int = ...,
    credits: int | None = ...,
) -> TiFL: ...
@overload
def get(
    name: Literal["refl"],
    *,
    rest: int = ...,
    prior: float = ...,
) -> REFL: ...
@overload
def get(
    name: Literal["clustered-size"],
) -> ClusteredSize: ...
@overload
def get(
    name: Literal["clustered-updates"],
    *,
    distance: Literal["angle", "euclidean"] = ...,
) -> ClusteredUpdates: ...
@overload
def get(
    name: Literal["optimal-sampling"],
    *,
    norms: Literal["reported", "asked"] = ...,
    explore: float = ...,
) -> OptimalSampling: ...
@overload
def get(
    name: Literal["k-vib"],
    *,
    theta: float = ...,
    gamma: float | None = ...,
) -> KVib: ...
@overload
def get(
    name: Literal["divfl"],
    *,
    weights: Literal["clusters", "equal"] = ...,
) -> DivFL: ...
@overload
def get(
    name: Literal["hics"],
    *,
    clusters: int = ...,
    temperature: float = ...,
    entropy_weight: float = ...,
    focus: float = ...,
    rounds: int = ...,
) -> HiCS: ...
@overload
def get(name: str) -> Policy[Any]: ...
def names() -> tuple[str, ...]: ...
