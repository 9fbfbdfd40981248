"""FedJAX's federated averaging, with its own loop over clients, batches and evaluation, on the given rows."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def load() -> Any:
    """Import the library; restore for it what newer versions of JAX have removed."""
    import jax

    if not hasattr(jax, "tree_map"):
        # mypy does not know the name that JAX has removed.
        jax.tree_map = jax.tree.map  # type: ignore[attr-defined]
    import fedjax

    return fedjax


def model_of(fedjax: Any, initial: dict[str, np.ndarray]) -> Any:
    """The perceptron (without hidden layers: logistic regression) as a FedJAX model."""
    import jax
    import jax.numpy as jnp

    depth = len(initial) // 2

    def apply(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for index in range(depth):
            x = x @ params[f"dense{index}.weight"] + params[f"dense{index}.bias"]
            x = jax.nn.relu(x) if index + 1 < depth else x
        return x

    return fedjax.Model(
        init=lambda rng: {name: jnp.asarray(value) for name, value in initial.items()},
        apply_for_train=lambda params, batch, rng: apply(params, batch),
        apply_for_eval=apply,
        train_loss=lambda batch, output: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], output),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
    )


def main(folder: str) -> None:
    """Take turns until there are none left."""
    # Run as a file: this is the module beside it. mypy expects a package.
    from turns import Turns, Work  # type: ignore[import-not-found]

    turns = Turns()
    try:
        fedjax = load()
    except ImportError as error:
        turns.missing(error)
        return
    import jax

    work = Work(folder)
    job, initial = work.job, work.initial()
    if job["task"].startswith("cnn"):
        turns.missing(ImportError("FedJAX is compared on perceptrons and logistic regression only"))
        return
    model = model_of(fedjax, initial)
    x, y, test_x, test_y = (work.array(name) for name in ("x", "y", "test_x", "test_y"))
    x, test_x = x.reshape(len(x), -1), test_x.reshape(len(test_x), -1)
    cohorts, batches = work.array("cohorts"), work.array("batches")  # its weights are equal, as the job's
    gradient = fedjax.model_grad(model)
    batching = fedjax.ShuffleRepeatBatchHParams(batch_size=job["batch"], num_epochs=1, skip_shuffle=True)
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        gradient, fedjax.optimizers.sgd(job["lr"]), fedjax.optimizers.sgd(1.0), batching
    )
    state = algorithm.init(model.init(None))
    # What FedJAX itself does to evaluate: batches padded to one shape, put on the device once.
    test = list(
        fedjax.padded_batch_client_datasets([fedjax.ClientDataset({"x": test_x, "y": test_y})], batch_size=10000)
    )
    all_rows = {"x": jax.device_put(x), "y": jax.device_put(y)}

    @jax.jit
    def whole_loss(params: Any, batch: Any) -> Any:
        return model.train_loss(batch, model.apply_for_eval(params, batch)).mean()

    keys = jax.random.split(jax.random.PRNGKey(0), job["cohort"])

    def one_round(index: int) -> float | None:
        nonlocal state
        clients = []
        for place, client in enumerate(cohorts[index]):
            rows = batches[index, place].ravel()
            clients.append((int(client), fedjax.ClientDataset({"x": x[rows], "y": y[rows]}), keys[place]))
        state, _ = algorithm.apply(state, clients)
        accuracy = None
        if work.evaluated(index):
            accuracy = float(fedjax.evaluate_model(model, state.params, test)["accuracy"])
        if work.measured(index):
            float(whole_loss(state.params, all_rows))
        return accuracy

    index, going = 0, turns.begin()
    while going:
        going = turns.done(one_round(index))
        index += 1
    work.finish("fedjax", {name: np.asarray(value) for name, value in state.params.items()})


if __name__ == "__main__":
    main(sys.argv[1])
