"""Callbacks that send the numbers of every round to TensorBoard, MLflow or Weights & Biases.

    from fedpick.callbacks import TensorBoard

    with Recorder("results/fedpick.sqlite", session, experiment="hospitals", callbacks=[TensorBoard("runs/pow-d")]):
        ...

A callback of your own subclasses `fedpick.core.record.Callback` and overrides `on_start`, `on_round` or `on_end`. In a
loop without a recorder, call the methods yourself; `fedpick.sim.simulate` takes `on_round=callback.on_round`.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpick.core import registry
from fedpick.core.errors import MissingDependency
from fedpick.core.record import Callback, RoundRecord
from fedpick.core.session import policy_name

if TYPE_CHECKING:
    from fedpick.core.session import Session

__all__ = ["Callback", "MLflow", "TensorBoard", "WeightsAndBiases", "facts_of", "scalars_of"]


def scalars_of(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round by name; what was not measured is missing."""
    outcome = record.outcome
    trained = outcome.train_loss[outcome.completed & np.isfinite(outcome.train_loss)]
    found = {
        "test/accuracy": record.test_accuracy,
        "test/loss": record.test_loss,
        "clients/objective": record.objective,
        "clients/local_accuracy": record.local_accuracy,
        "cohort/train_loss": float(trained.mean()) if len(trained) else None,
        "cohort/available": float(record.num_available),
        "cohort/selected": float(len(outcome.clients)),
        "cohort/completed": float(np.count_nonzero(outcome.completed)),
        "sent/bytes_down": float(record.counters.bytes_down),
        "sent/bytes_up": float(record.counters.bytes_up),
    }
    for name, value in record.selection.diagnostics.items():
        if isinstance(value, (int, float, np.number)):
            found[f"policy/{name}"] = float(value)
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def facts_of(session: Session) -> dict[str, Any]:
    """What identifies a run: policy, hyper-parameters, seed and number of clients."""
    policy = session.policy
    return {
        "policy": policy_name(policy),
        **{f"policy.{name}": value for name, value in registry.parameters(policy).items()},
        "seed": session.seed,
        "clients": len(session.clients),
    }


def _require(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDependency(f"This callback needs {package}. Install it with: pip install {package}") from error


class TensorBoard(Callback):
    """Writes event files for `tensorboard --logdir`. It needs the package tensorboard, not TensorFlow.

    Args:
        directory: of this run's event files, created if missing.
    """

    def __init__(self, directory: str | Path) -> None:
        summary = _require("tensorboard.summary", "tensorboard")
        self._writer: Any = summary.Writer(summary.DirectoryOutput(str(directory)))

    def on_round(self, record: RoundRecord) -> None:
        """Write the numbers of the round; its index is the step."""
        for name, value in scalars_of(record).items():
            self._writer.add_scalar(name, value, record.index)
        self._writer.flush()

    def on_end(self, error: BaseException | None = None) -> None:
        """Close the file."""
        self._writer.close()


class MLflow(Callback):
    """Logs a run to an MLflow server or directory. It needs the package mlflow-skinny or mlflow.

    Args:
        experiment: the name of the MLflow experiment, created if missing.
        run_name: the name of the run; None: MLflow makes one up.
        tracking_uri: the server or directory; None: as MLflow is configured.
    """

    def __init__(self, experiment: str, *, run_name: str | None = None, tracking_uri: str | None = None) -> None:
        self._mlflow = _require("mlflow", "mlflow-skinny")
        self._client = self._mlflow.MlflowClient(tracking_uri=tracking_uri)
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        self.run_id: str = self._client.create_run(number, run_name=run_name).info.run_id
        """The id of the MLflow run."""

    def on_start(self, session: Session) -> None:
        """Log policy, hyper-parameters and seed."""
        for name, value in facts_of(session).items():
            self._client.log_param(self.run_id, name, value)

    def on_round(self, record: RoundRecord) -> None:
        """Log the numbers of the round; its index is the step."""
        now, metric = int(1000 * time.time()), self._mlflow.entities.Metric
        metrics = [metric(name, value, now, record.index) for name, value in scalars_of(record).items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def on_end(self, error: BaseException | None = None) -> None:
        """End the MLflow run."""
        self._client.set_terminated(self.run_id, "FINISHED" if error is None else "FAILED")


class WeightsAndBiases(Callback):
    """Logs a run to Weights & Biases. It needs the package wandb.

    Args:
        options: for `wandb.init`, such as project="hospitals", name="pow-d", mode="offline".
    """

    def __init__(self, **options: Any) -> None:
        self._run: Any = _require("wandb", "wandb").init(**options)

    def on_start(self, session: Session) -> None:
        """Log policy, hyper-parameters and seed."""
        facts: Mapping[str, Any] = facts_of(session)
        self._run.config.update(dict(facts))

    def on_round(self, record: RoundRecord) -> None:
        """Log the numbers of the round; its index is the step."""
        self._run.log(scalars_of(record), step=record.index)

    def on_end(self, error: BaseException | None = None) -> None:
        """End the W&B run."""
        self._run.finish(exit_code=0 if error is None else 1)
