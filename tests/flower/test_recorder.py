"""Rounds of a federation in fedpick's store, with the same tables as a simulation."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed: pip install 'fedpick[sim]'")

from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import strategy as flower

import fedpick
from fedpick.experiments.recorder import Recorder
from fedpick.experiments.store import Store
from fedpick.experiments.verify import verify
from fedpick.flower import with_policy
from tests.flower.fake_grid import federation, node_of


class Killed(BaseException):
    """Ends the server, as Ctrl-C would."""


def train(tmp_path, *, rounds, kill_in=0, start=0.0):
    """Run a federation with a failing client; the server dies in the evaluation of a round if asked to."""
    grid = federation(5)
    grid.on_send = lambda message: setattr(
        node_of(grid, 2), "mode", "error" if message.metadata.message_type == "train" else "good"
    )
    recorder = Recorder(tmp_path / "results.sqlite", experiment="hospital", rounds=6)
    strategy = with_policy(
        flower.FedAvg(fraction_evaluate=0.0),
        fedpick.policies.get("pow-d", num_candidates=5),
        budget=3,
        seed=3,
        state=tmp_path / "policy",
        record=recorder,
    )

    def evaluate(server_round, arrays):
        if server_round:  # the store is never behind the saved state, whenever the server dies
            saved = tmp_path / "policy" / "session.npz"
            with closing(Store(tmp_path / "results.sqlite")) as store:
                recorded = store.run(recorder.run_id).rounds_done
            assert (fedpick.Session.load(saved.parent).round if saved.exists() else 0) == recorded
        if kill_in and server_round == kill_in:
            raise Killed
        return MetricRecord({"accuracy": 0.1 * server_round, "loss": 1.0 / (1 + server_round)})

    arrays = ArrayRecord({"w": Array(np.full(3, start))})
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, evaluate_fn=evaluate)


def test_a_federation_is_in_the_store_also_after_the_server_was_stopped(tmp_path):
    with pytest.raises(Killed):
        train(tmp_path, rounds=6, kill_in=3)
    assert fedpick.Session.load(tmp_path / "policy").round == 3
    train(tmp_path, rounds=3)
    with closing(Store(tmp_path / "results.sqlite")) as store:
        (run,) = store.runs(store.experiments()[0].id)
        assert (run.policy, run.seed, run.status, run.rounds_done) == ("pow-d", 3, "done", 6)
        columns = store.rounds(run.id)
        assert columns["accuracy"].tolist() == pytest.approx([0.1, 0.2, np.nan, 0.1, 0.2, 0.3], nan_ok=True)
        assert (np.diff(columns["bytes_down"]) > 0).all()
        (choices,) = store.choices(run.id)
        assert np.bincount(choices.row).tolist() == [3] * 6
        failed = choices.clients == 2
        assert failed.any() and not choices.completed[failed].any() and not choices.weights[failed].any()
        assert np.bincount(choices.row, weights=choices.weights).tolist() == pytest.approx([1.0] * 6)
        assert verify(store).sentences == []
