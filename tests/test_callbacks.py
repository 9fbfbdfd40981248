"""The callbacks against the real packages, offline."""

from __future__ import annotations

import numpy as np
import pytest

import fedpick
from fedpick import callbacks
from fedpick.core.errors import MissingDependency
from fedpick.core.record import Counters, RoundRecord


def record(index, accuracy=None):
    clients = np.array([1, 3])
    return RoundRecord(
        index=index,
        selection=fedpick.Selection(clients=clients, diagnostics={"gain": 0.5, "phase": "warm", "mask": np.ones(4)}),
        outcome=fedpick.Outcome(
            index=index, clients=clients, completed=np.array([True, False]), train_loss=np.array([0.25, 9.0])
        ),
        weights=np.array([1.0, 0.0]),
        available=np.ones(4, bool),
        counters=Counters(bytes_down=800, bytes_up=400),
        test_accuracy=accuracy,
    )


SESSION = fedpick.Session(
    fedpick.policies.get("pow-d", num_candidates=3), fedpick.Clients(num_examples=np.ones(4)), seed=7
)
EXPECTED = {
    "test/accuracy": 0.75, "cohort/train_loss": 0.25, "cohort/available": 4, "cohort/selected": 2,
    "cohort/completed": 1, "sent/bytes_down": 800, "sent/bytes_up": 400, "policy/gain": 0.5,
}  # fmt: skip


def drive(callback):
    callback.on_start(SESSION)
    callback.on_round(record(0))
    callback.on_round(record(1, 0.75))
    callback.on_end()


def test_only_what_was_measured_is_sent():
    assert callbacks.scalars_of(record(1, 0.75)) == EXPECTED
    assert "test/accuracy" not in callbacks.scalars_of(record(0))
    assert callbacks.facts_of(SESSION)["policy.num_candidates"] == 3


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: callbacks.TensorBoard("runs"), "tensorboard"),
        (lambda: callbacks.MLflow("e"), "mlflow-skinny"),
        (lambda: callbacks.WeightsAndBiases(), "wandb"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, make, package):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(callbacks.importlib, "import_module", missing)
    with pytest.raises(MissingDependency, match=f"pip install {package}"):
        make()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    drive(callbacks.TensorBoard(tmp_path))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    found = {name: read.Tensors(name)[-1] for name in read.Tags()["tensors"]}
    assert {name: float(tensor_util.make_ndarray(event.tensor_proto)) for name, event in found.items()} == EXPECTED
    assert [event.step for event in read.Tensors("cohort/selected")] == [0, 1]


@pytest.mark.filterwarnings("ignore")
def test_mlflow(tmp_path):
    pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    pytest.importorskip("alembic", reason="needs alembic, for MLflow's store in a file")
    from mlflow import MlflowClient

    place = f"sqlite:///{tmp_path}/mlflow.db"
    made = callbacks.MLflow("hospitals", run_name="pow-d", tracking_uri=place)
    drive(made)
    run = MlflowClient(tracking_uri=place).get_run(made.run_id)
    assert run.data.metrics == EXPECTED
    assert run.data.params["policy.num_candidates"] == "3" and run.data.params["seed"] == "7"
    assert run.info.status == "FINISHED"
    steps = MlflowClient(tracking_uri=place).get_metric_history(made.run_id, "cohort/selected")
    assert [metric.step for metric in steps] == [0, 1]


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    made = callbacks.WeightsAndBiases(project="hospitals", mode="offline", dir=str(tmp_path))
    drive(made)
    (file,) = tmp_path.rglob("*.wandb")  # a log of protocol buffers, whose strings are plain
    written = file.read_bytes()
    for name, value in EXPECTED.items():
        assert name.encode() in written and f"{value:g}".encode() in written, name
    assert b"policy.num_candidates" in written and b"pow-d" in written
