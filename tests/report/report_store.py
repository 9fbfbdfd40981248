"""A store as a run would leave it, made of random numbers: for tests of everything that reads one."""

from __future__ import annotations

import json

import numpy as np

from fedpick.core.record import Counters, RoundRecord, Timings
from fedpick.core.types import Outcome, Selection
from fedpick.experiments.spec import Named, PolicySpec, Spec
from fedpick.experiments.store import Store

HOSTILE = '<i>a & "b"</script>'


def make_spec(labels=("uniform", "fedcor", "ca-fed"), *, seeds=2, rounds=30, targets=(0.5, 0.8), budget=4, title="toy"):
    known = {"uniform", "fedcor", "ca-fed", "fedgs"}
    return Spec(
        title=title,
        data=Named(name="toy"),
        partition=Named(name="2spc", options={"num_clients": 40}),
        task=Named(name="toy"),
        availability=Named(name="log-normal", options={"beta": 0.5}),
        local={"lr": 0.1},
        server={},
        faults={},
        simulator={},
        rounds=rounds,
        budget=budget,
        seeds=tuple(range(seeds)),
        evaluate_every=1,
        losses_every=None,
        local_accuracy_every=None,
        targets=targets,
        policies=tuple(
            PolicySpec(name=label if label in known else "uniform", label=label, parameters={"number": index})
            for index, label in enumerate(labels)
        ),
    )


def make_store(path, spec=None, *, num_clients=40, num_classes=5, done=None, every=1, everybody=False):
    """The store, with `done` rounds of every run (a number, or a function of the run)."""
    spec = spec or make_spec()
    store = Store(path)
    experiment = store.register(spec)
    rng = np.random.default_rng(0)
    histogram = rng.integers(0, 4, size=(num_clients, num_classes), dtype=np.int32)
    for run in store.runs(experiment):
        rounds = spec.rounds if done is None else done(run) if callable(done) else done
        federation = store.put_federation(
            f"toy-{run.seed}",
            data="toy",
            partition="2spc",
            num_clients=num_clients,
            num_classes=num_classes,
            num_examples=(1.0 + histogram.sum(axis=1)).astype("<f8").tobytes(),
            label_histogram=histogram.astype("<i4").tobytes(),
        )
        manifest = {"versions": {"fedpick": "0.1.0"}, "host": {"system": "Linux", "cores": 2}, "started_at": "now"}
        store.update_run(
            run.id,
            federation_id=federation,
            reference="@misc{" + run.policy + ", title = {A & B}}",
            manifest=json.dumps(manifest),
            status="done" if rounds >= spec.rounds else "stopped",
        )
        store.take(run.id)
        for index in range(rounds):
            store.write_round(
                run.id, _record(rng, run, index, num_clients, spec.budget, every, everybody), checkpoint=None
            )
        store.release(run.id)
    return store


def _record(rng, run, index, num_clients, budget, every, everybody):
    available = np.ones(num_clients, bool) if everybody else rng.random(num_clients) < 0.6
    pool = np.flatnonzero(available)
    clients = rng.choice(pool, size=min(budget, len(pool)), replace=False)
    size = len(clients)
    looked = (index + 1) % every == 0
    accuracy = 1 - 0.9 * np.exp(-(index + 1) / (8 + 3 * run.position)) + rng.normal(scale=0.01)
    diagnostics = {}
    if run.policy == "fedcor" and index % 10 == 5 and num_clients <= 500:
        embedding = rng.normal(size=(3, num_clients))
        diagnostics = {"embedding": embedding, "correlation": np.corrcoef(embedding.T)}
    if run.policy == "ca-fed":
        diagnostics = {"epsilon_opt": 1 / (index + 1), "epsilon_bias": 0.1, "excluded": index % 5, "phase": "normal"}
    done = rng.random(size) < 0.9
    return RoundRecord(
        index=index,
        selection=Selection(clients=clients, diagnostics=diagnostics),
        outcome=Outcome(
            index=index, clients=clients, completed=done, loss=rng.random(size), train_loss=rng.random(size)
        ),
        weights=np.where(done, 1 / max(size, 1), 0.0),
        available=available,
        counters=Counters(
            models_down=budget * (index + 1),
            updates_up=budget * (index + 1),
            bytes_down=1000 * (run.position + 1) * (index + 1),
            bytes_up=1000 * (index + 1),
        ),
        seconds=Timings(select=0.001, train=0.01, evaluate=0.001),
        test_accuracy=float(np.clip(accuracy, 0, 1)) if looked else None,
        test_loss=float(2 * (1.01 - accuracy)) if looked else None,
    )
