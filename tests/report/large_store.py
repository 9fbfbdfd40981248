"""A store with as many rounds as a test wants, inserted in bulk: for tests of how reading scales.

python -m tests.report.large_store results/large.sqlite 1000000
"""

from __future__ import annotations

import json
import sqlite3
import sys
import zlib

import numpy as np

from fedpick.experiments import schema as tables
from fedpick.experiments.store import Store
from tests.report.report_store import make_spec

LABELS = ("uniform", "fedcor", "ca-fed", "fedgs", "other")


def make_large_store(path, num_rounds, *, seeds=20, num_clients=100, budget=10):
    """Five policies x `seeds` that have `num_rounds` rounds together. Rows have no checksums."""
    rounds = num_rounds // (len(LABELS) * seeds)
    store = Store(path)
    experiment = store.register(make_spec(LABELS, seeds=seeds, rounds=rounds, budget=budget, title="large"))
    rng = np.random.default_rng(0)
    histogram = rng.integers(0, 4, size=(num_clients, 10), dtype=np.int32)
    members = store.runs(experiment)
    federations = {
        run.seed: store.put_federation(
            f"large-{run.seed}",
            data="toy",
            partition="2spc",
            num_clients=num_clients,
            num_classes=10,
            num_examples=(1.0 + histogram.sum(axis=1)).astype("<f8").tobytes(),
            label_histogram=histogram.astype("<i4").tobytes(),
        )
        for run in members
    }
    store.close()
    with sqlite3.connect(path) as connection:
        for run in members:
            connection.execute(
                "UPDATE runs SET federation_id = ?, status = 'done', rounds_done = ? WHERE id = ?",
                (federations[run.seed], rounds, run.id),
            )
            for table, rows in (
                (tables.rounds, _round_rows(run, rounds, budget, rng)),
                (tables.selections, _selection_rows(run, rounds, num_clients, budget, rng)),
            ):
                names = [column.name for column in table.c if column.name != "clock"]
                places = ", ".join("?" * len(names))
                connection.executemany(f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({places})", rows)
    connection.close()


def _round_rows(run, rounds, budget, rng):
    accuracy = np.clip(1 - 0.9 * np.exp(-np.arange(1, rounds + 1) / 800) + rng.normal(scale=0.01, size=rounds), 0, 1)
    for index, value in enumerate(accuracy.tolist()):
        diagnostics = {"epsilon_opt": 1 / (index + 1), "epsilon_bias": 0.1, "excluded": index % 5}
        sent = budget * (index + 1)
        yield (
            *(run.id, index, 60, budget, budget, value, 1.01 - value, 1.0 - value, None, None),
            *(sent, sent, 0, 1000 * sent, 1000 * sent, 0.001, None, 0.01, 0.001),
            json.dumps(diagnostics if run.policy == "ca-fed" else {}),
        )


def _selection_rows(run, rounds, num_clients, budget, rng):
    weights, losses = np.full(budget, 1 / budget).tobytes(), rng.random(budget).tobytes()
    done, unknown = np.ones(budget, np.uint8).tobytes(), np.full(budget, np.nan).tobytes()
    for index in range(rounds):
        there = rng.random(num_clients) < 0.6
        clients = np.sort(rng.choice(np.flatnonzero(there), budget, replace=False)).astype("<i4").tobytes()
        mask = zlib.compress(np.packbits(there).tobytes(), 6)
        yield (run.id, index, clients, None, weights, done, losses, losses, unknown, unknown, mask)


if __name__ == "__main__":
    make_large_store(sys.argv[1], int(sys.argv[2]))
