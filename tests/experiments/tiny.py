"""Tiny experiments: real runs of some milliseconds a round, for tests of everything around them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import numpy as np

from fedpick.core.policy import Policy
from fedpick.core.record import RoundRecord
from fedpick.core.state import Stateless
from fedpick.core.types import Outcome, Selection
from fedpick.experiments.spec import parse_spec

NUM_CLIENTS = 24
NUM_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class Slow(Policy[Stateless]):
    """The first clients, after TINY_SLEEP seconds; raises in round `fail_at`."""

    fail_at: int = -1
    which: int = 0

    def init(self, clients, rng):
        return Stateless()

    def select(self, state, context, rng):
        if context.index == self.fail_at:
            raise RuntimeError("made to fail")
        time.sleep(float(os.environ.get("TINY_SLEEP", "0")))
        chosen = np.flatnonzero(context.available)[: context.budget]
        return Selection(clients=chosen, diagnostics={"squares": chosen**2.0, "norm": 1.0 + context.index}), state

    def observe(self, state, outcome):
        return state  # overridden: its rounds are computed one by one


SLOW = "tests.experiments.tiny:Slow"


def empty_round(index, **more):
    """A round in which nothing happened."""
    nobody = np.empty(0, np.int64)
    return RoundRecord(
        index=index,
        selection=Selection(clients=nobody),
        outcome=Outcome(index=index, clients=nobody, completed=nobody.astype(bool)),
        weights=np.empty(0),
        available=np.ones(4, bool),
        **more,
    )


def tiny_spec(policies=("uniform", "rpow-d", "afl"), *, rounds=50, seeds=2, targets=(0.5,), every=1):
    content = {
        "title": "tiny",
        "data": {"name": "synthetic", "num_clients": NUM_CLIENTS},
        "partition": {"name": "natural"},
        "task": {"name": "logistic"},
        "local": {"lr": 0.05, "steps": 2, "batch_size": 4},
        "availability": {"name": "log-normal", "beta": 0.3},
        "faults": {"dropout": 0.1},
        "simulator": {"shards": 1},
        "run": {
            "rounds": rounds,
            "budget": 4,
            "seeds": seeds,
            "targets": list(targets),
            "evaluate_every": every,
            "guard": "off",  # it would cut the largest client, and warn
        },
        "policies": [policy if isinstance(policy, dict) else {"name": policy} for policy in policies],
    }
    return parse_spec(content)


def slow_spec(rounds=50):
    """Runs that TINY_SLEEP makes slow: three policies, two seeds."""
    return tiny_spec([{"name": SLOW, "label": f"slow {which}", "which": which} for which in range(3)], rounds=rounds)
