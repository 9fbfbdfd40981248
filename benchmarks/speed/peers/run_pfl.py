"""pfl-research's federated averaging in its simulated backend, on the given rows."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np


def module_of(model: Any) -> Any:
    """The PyTorch model with the two methods that pfl needs."""
    import torch

    # Without PyTorch, mypy takes the base class for Any.
    class Module(torch.nn.Module):  # type: ignore[misc]
        """The model and its loss."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Any) -> Any:
            """Raw outputs."""
            return self.layers(x)

        def loss(self, x: Any, y: Any, is_eval: bool = False) -> Any:
            """Mean cross-entropy."""
            return torch.nn.functional.cross_entropy(self(x), y)

        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            """Empty: the test accuracy is measured centrally."""
            return {}

    return Module()


def callback_of(base: Any, metrics: Any, work: Any, turns: Any, arrays: dict[str, Any]) -> Any:
    """Measure the test accuracy after every round and wait when the turn is done."""
    import torch

    # As above: pfl is not installed where types are checked.
    class Look(base):  # type: ignore[misc]
        """See pfl."""

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            """One round is done."""
            accuracy, module = None, model.pytorch_model
            with torch.no_grad():
                if work.evaluated(central_iteration):
                    accuracy = float((module(arrays["test_x"]).argmax(dim=1) == arrays["test_y"]).float().mean())
                if work.measured(central_iteration):
                    float(module.loss(arrays["x"], arrays["y"]))
            return not turns.done(accuracy), metrics()

    return Look()


def main(folder: str) -> None:
    """Take turns until there are none left."""
    # Run as a file: these are the modules beside it. mypy expects a package.
    from run_torch import build, choose_threads, images, params_of  # type: ignore[import-not-found]
    from turns import Turns, Work  # type: ignore[import-not-found]

    turns = Turns()
    try:
        import torch
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.algorithm.base import NNAlgorithmParams
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.callback.base import TrainingProcessCallback
        from pfl.data.dataset import Dataset
        from pfl.data.federated_dataset import FederatedDataset
        from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
        from pfl.metrics import Metrics
        from pfl.model.pytorch import PyTorchModel
    except ImportError as error:
        turns.missing(error)
        return
    work = Work(folder)
    job, initial = work.job, work.initial()
    shape = job["shape"] if job["task"].startswith("cnn") else []
    arrays = {name: images(work.array(name), shape) for name in ("x", "test_x")}
    if not shape:
        arrays = {name: rows.reshape(len(rows), -1) for name, rows in arrays.items()}
    arrays |= {name: torch.tensor(work.array(name).astype(np.int64)) for name in ("y", "test_y")}
    batches = torch.tensor(work.array("batches").astype(np.int64))
    layers = build(initial, job["shape"])
    choose_threads(layers, arrays["x"][batches[0, 0, 0]], arrays["y"][batches[0, 0, 0]])
    module = module_of(layers)
    places = itertools.product(range(job["rounds"]), range(job["cohort"]))

    def rows_of(place: tuple[int, int]) -> Any:
        rows = batches[place].ravel()
        return Dataset((arrays["x"][rows], arrays["y"][rows]), user_id=str(place))

    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    training = NNTrainHyperParams(local_batch_size=job["batch"], local_num_epochs=1, local_learning_rate=job["lr"])
    dataset = FederatedDataset(rows_of, lambda: next(places))
    if turns.begin():
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=job["rounds"],
                evaluation_frequency=10**9,
                train_cohort_size=job["cohort"],
                val_cohort_size=None,
            ),
            SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[]),
            model,
            training,
            NNEvalHyperParams(local_batch_size=10_000),
            callbacks=[callback_of(TrainingProcessCallback, Metrics, work, turns, arrays)],
        )
    work.finish("pfl", params_of(layers, initial))


if __name__ == "__main__":
    main(sys.argv[1])
