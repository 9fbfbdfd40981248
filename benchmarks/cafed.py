"""Two data sets and a policy for the question why CA-Fed's gain does not appear (`specs/cafed-why.toml`).

A spec names them by import path, such as `benchmarks.cafed:clustered`. Call `fedpick run` in the repository's root.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from fedpick.availability.estimators import AvailabilityCounts
from fedpick.core.policy import Signal
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import RoundContext, Selection
from fedpick.data import Dataset, load
from fedpick.policies._estimates import (
    RODIO,
    AvailabilityAware,
    availability_of,
    correlation_of,
    count_mask,
    inverse_weights,
    oracle_signals,
    sample_within_budget,
)

__all__ = ["WithoutCorrelated", "augmented", "clustered"]


def clustered(
    *,
    num_clients: int = 24,
    dimension: int = 10,
    train_examples: int = 50,
    test_examples: int = 150,
    flipped: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """The clustered Synthetic of the authors' scripts: one logistic model, and labels flipped for half of the clients.

    x ~ N(0, I), P(y = 1) = sigmoid(w'x) with one w ~ N(0, I) for all clients. In the second half of the clients a label
    is flipped with probability `flipped`.
    """
    rng = stream(seed, 0, Purpose.DATA)
    per_client = train_examples + test_examples
    model = rng.standard_normal(dimension)
    x = rng.standard_normal((num_clients, per_client, dimension)).astype(np.float32)
    y = rng.random((num_clients, per_client)) < 1 / (1 + np.exp(-x @ model))
    y[num_clients // 2 :] ^= rng.random(y[num_clients // 2 :].shape) < flipped
    train, test = slice(train_examples), slice(train_examples, None)
    return Dataset(
        name="clustered",
        train_x=x[:, train].reshape(-1, dimension),
        train_y=y[:, train].ravel().astype(np.int32),
        test_x=x[:, test].reshape(-1, dimension),
        test_y=y[:, test].ravel().astype(np.int32),
        num_classes=2,
        groups=np.repeat(np.arange(num_clients), train_examples),
        info={"flipped": flipped, "seed": seed},
    )


def augmented(*, num_clients: int = 100, times: int = 10, num_examples: int = 7000, seed: int = 0) -> Dataset:
    """Synthetic(0.5, 0.5) in which the first half of the clients, the more available, has `times` times the examples.

    The option `--augmentation` of the authors' generator, with its numbers. That the paper used it is inferred. The
    availability must have `order = "blocks"`, which puts the more available clients first.
    """
    few = int(num_examples / ((times + 1) * num_clients / 2))
    equal = load(
        "synthetic", alpha=0.5, beta=0.5, num_clients=num_clients, seed=seed,
        size_mean=0.0, size_spread=0.0, size_offset=times * few - 1, test_fraction=0.0,
    )  # fmt: skip
    owner = np.asarray(equal.groups)
    place = np.arange(len(owner)) % (times * few)
    size = np.where(owner < num_clients // 2, times * few, few)
    train = place < np.floor(0.9 * size + 1e-6)
    test = ~train & (place < size)
    return replace(
        equal,
        name="augmented",
        train_x=equal.train_x[train],
        train_y=equal.train_y[train],
        test_x=equal.train_x[test],
        test_y=equal.train_y[test],
        groups=owner[train],
        info={**equal.info, "times": times},
    )


@final
@dataclass(frozen=True, kw_only=True)
class WithoutCorrelated(AvailabilityAware):
    """Unbiased without the clients that CA-Fed means to exclude: pi_k < 1/2 and lambda_k > 1/2."""

    reference: ClassVar[str] = RODIO

    @property
    def needs(self) -> frozenset[Signal]:
        """The true availability and correlation, with estimates="oracle"."""
        return oracle_signals(self, Signal.AVAILABILITY, Signal.CORRELATION)

    def select(
        self, state: AvailabilityCounts, context: RoundContext, rng: np.random.Generator
    ) -> tuple[Selection, AvailabilityCounts]:
        """The other available clients, or a uniform sample of them."""
        state = count_mask(self, state, context)
        availability = availability_of(self, state, context)
        out = (availability < 0.5) & (correlation_of(self, state, context) > 0.5)
        eligible = context.available & ~out
        weights = inverse_weights(availability, eligible, context)
        chosen, factor = sample_within_budget(eligible, context.budget, rng)
        diagnostics = {"excluded": int(np.count_nonzero(out))}
        return Selection(
            clients=chosen, weights=weights[chosen] * factor, renormalize=False, diagnostics=diagnostics
        ), state
