"""A federation of vectors: real sessions and policies, training in microseconds, for tests of everything around it."""

from __future__ import annotations

import os
import time

import numpy as np

from fedpick import availability
from fedpick.core import registry
from fedpick.core import state as states
from fedpick.core.session import Session
from fedpick.core.types import Clients, Outcome, aggregation_weights
from fedpick.experiments.records import RoundRecord, pack_checkpoint, unpack_checkpoint
from fedpick.experiments.spec import Named, PolicySpec, Spec

NUM_CLIENTS = 24
DIMENSION = 6


def empty_round(index, **more):
    """A round in which nothing happened."""
    nothing = np.empty(0)
    return RoundRecord(
        index=index, available=np.ones(4, bool), clients=np.empty(0, np.int64), given_weights=None,
        weights=nothing, completed=np.empty(0, bool), loss=nothing, train_loss=nothing, duration=nothing,
        update_norm=nothing, seconds={},
        counters=dict.fromkeys(("models_down", "updates_up", "scalars_up", "bytes_down", "bytes_up"), 0), **more,
    )  # fmt: skip


class TinySimulation:
    def __init__(self, settings):
        self.settings = settings
        seed = settings["seed"]
        rng = np.random.default_rng([seed, 1])
        self.targets = rng.normal(size=(NUM_CLIENTS, DIMENSION))
        histogram = rng.integers(0, 9, size=(NUM_CLIENTS, 3))
        clients = Clients(num_examples=1.0 + histogram.sum(axis=1), label_histogram=histogram.astype(float))
        options = {key: value for key, value in settings["availability"].items() if key != "name"}
        self.trace = availability.get(settings["availability"]["name"], **options).start(clients, seed)
        parameters = {key: value for key, value in settings["policy"].items() if key != "name"}
        self.session = Session(registry.get(settings["policy"]["name"], **parameters), clients, seed)
        self.model = np.zeros(DIMENSION)
        self.sent = 0
        self.model_bytes = 8 * DIMENSION
        self.facts = {"simulator": "tiny"}
        self.federation = {
            "key": f"tiny-{seed}",
            "data": "tiny",
            "partition": "tiny",
            "num_clients": NUM_CLIENTS,
            "num_classes": 3,
            "num_examples": clients.num_examples.astype("<f8").tobytes(),
            "label_histogram": histogram.astype("<i4").tobytes(),
        }

    @property
    def policy(self):
        return self.session.policy

    def _loss(self, clients):
        return ((self.model - self.targets[clients]) ** 2).mean(axis=-1)

    def rounds(self, until):
        while True:
            time.sleep(float(os.environ.get("TINY_SLEEP", "0")))
            index = self.session.round
            if index == self.settings["local"].get("fail_at"):
                raise RuntimeError("made to fail")
            mask = self.trace.mask(index)
            selection = self.session.ask(
                available=mask, budget=self.settings["budget"], measure=lambda probe: self._loss(probe.clients)
            )
            chosen = selection.clients
            rng = np.random.default_rng([self.settings["seed"], index])
            completed = rng.random(NUM_CLIENTS)[chosen] < 0.9
            outcome = Outcome(
                index=index, clients=chosen, completed=completed, loss=self._loss(chosen), train_loss=self._loss(chosen)
            )
            weights = aggregation_weights(selection, completed, self.session.clients)
            rate = self.settings["local"]["lr"]
            self.model = self.model + rate * weights @ (self.targets[chosen] - self.model)
            self.sent += len(chosen)
            self.session.tell(outcome)
            distance = float(np.linalg.norm(self.model - self.targets.mean(axis=0)))
            looked = (index + 1) % self.settings["evaluate_every"] == 0
            yield RoundRecord(
                index=index,
                available=mask,
                clients=chosen,
                given_weights=selection.weights,
                weights=weights,
                completed=completed,
                loss=outcome.loss,
                train_loss=outcome.train_loss,
                duration=outcome.duration,
                update_norm=outcome.update_norm,
                counters={
                    "models_down": self.sent,
                    "updates_up": self.sent,
                    "scalars_up": 0,
                    "bytes_down": 48 * self.sent,
                    "bytes_up": 48 * self.sent,
                },
                seconds={"select": 1e-3, "measure": 0.0, "train": 2e-3, "evaluate": 0.0},
                test_accuracy=1 / (1 + distance) if looked else None,
                test_loss=distance if looked else None,
                diagnostics={**selection.diagnostics, "model": self.model, "norm": float(np.linalg.norm(self.model))},
            )

    def checkpoint(self):
        arrays, plain = states.split(self.session.state)
        stored = {f"policy/{name}": value for name, value in arrays.items()}
        return pack_checkpoint(
            {**stored, "model": self.model}, {"round": self.session.round, "policy": plain, "sent": self.sent}
        )

    def restore(self, content):
        arrays, plain = unpack_checkpoint(content)
        self.model, self.sent = arrays.pop("model"), plain["sent"]
        policy = {name.removeprefix("policy/"): value for name, value in arrays.items()}
        self.session.restore(policy, plain["policy"], round=plain["round"])


BUILD = "tests.experiments.tiny_simulation:TinySimulation"


def tiny_spec(policies=("uniform", "rpow-d", "afl"), *, rounds=50, seeds=2, targets=(0.5,), every=1, **local):
    entries = [{"name": policy} if isinstance(policy, str) else policy for policy in policies]
    return Spec(
        title="tiny",
        data=Named(name="tiny"),
        partition=Named(name="tiny"),
        task=Named(name="tiny"),
        local={"lr": 0.3, **local},
        server={},
        availability=Named(name="log-normal", options={"beta": 0.3}),
        faults={},
        simulator={},
        rounds=rounds,
        budget=4,
        seeds=tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds),
        targets=tuple(targets),
        evaluate_every=every,
        policies=tuple(
            PolicySpec(
                name=entry["name"],
                label=entry.get("label", entry["name"]),
                parameters={key: value for key, value in entry.items() if key not in ("name", "label", "local")},
                local=entry.get("local", {}),
            )
            for entry in entries
        ),
    )
