"""The clients' examples: the right ones, and no second copy of those that can be shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpick.core.errors import InvalidInput
from fedpick.core.types import Selection
from fedpick.data.types import Federation
from fedpick.sim import LocalTraining, Simulator, Task, examples
from fedpick.sim.examples import Examples, aligned, frozen
from tests.sim.naive_loop import make_federation

ON_CPU = jax.default_backend() == "cpu"


def plain(x):
    """A federation of two clients whose data need no normalising and are in order."""
    ends = np.array([len(x) // 2, len(x)])
    return Federation(
        name="plain",
        partition="natural",
        x=x,
        y=np.zeros(len(x), np.int32),
        indices=np.arange(len(x), dtype=np.int32),
        offsets=np.append(0, ends),
        train_ends=ends,
        validation_ends=ends,
        test_x=x[:0],
        test_y=np.zeros(0, np.int32),
        num_classes=2,
    )


def filled():
    x = aligned((200, 3), np.float32)
    x[:] = np.arange(600).reshape(200, 3)
    return x


@pytest.mark.skipif(not ON_CPU, reason="Only a CPU can share the memory of a numpy array.")
def test_frozen_and_aligned_data_are_shared():
    x = frozen(filled())
    assert jax.device_put(Examples(plain(x)).x).unsafe_buffer_pointer() == x.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        x[0, 0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        x.base[:] = 1


def test_data_that_the_caller_can_write_to_are_not_shared():
    x = filled()
    held = Examples(plain(x))
    x[:] = -1.0
    np.testing.assert_array_equal(held.x, np.arange(600).reshape(200, 3))


@pytest.mark.parametrize("block", [7, 10_000])
def test_normalised_rows_in_the_order_of_the_clients(monkeypatch, block):
    monkeypatch.setattr(examples, "_ROWS_AT_ONCE", block)
    federation = make_federation(shape=(3, 2, 1))
    held = Examples(federation)
    expected = federation.normalized(federation.x[federation.indices]).reshape(-1, 6)
    np.testing.assert_array_equal(held.x, expected)
    np.testing.assert_array_equal(held.y, federation.y[federation.indices])
    np.testing.assert_array_equal(held.test_x, federation.normalized(federation.test_x).reshape(-1, 6))


def good_loss(params, x, y, key, train):
    return ((x @ params - y[:, None]) ** 2).mean(axis=1)


def good_answer(params, x, y):
    return (x @ params).argmax(axis=1) == y


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"per_example_loss": lambda *given: good_loss(*given).mean()},
            r"one number per example.*float32 of shape \(\)",
        ),
        ({"per_example_loss": lambda *given: good_loss(*given)[:, None]}, r"one number per example.*of shape \(8, 1\)"),
        ({"per_example_loss": lambda *given: 0.0}, r"one number per example.*of shape \(\)"),
        ({"correct": lambda *given: good_answer(*given).mean()}, r"one truth value per example.*float32 of shape \(\)"),
        ({"correct": lambda params, x, y: (x @ params).argmax(axis=1)}, r"one truth value per example.*Got int32"),
    ],
)
def test_a_task_that_does_not_answer_for_every_example_is_refused(changes, says):
    functions = {"init": lambda key: jnp.zeros((6, 3)), "per_example_loss": good_loss, "correct": good_answer}
    good, bad = (
        Simulator(
            make_federation(),
            Task(name="mine", **{**functions, **given}),
            local=LocalTraining(lr=0.1, steps=1, batch_size=8),
        )
        for given in ({}, changes)
    )
    good.train(Selection(clients=[0, 1]))
    good.evaluate()
    with pytest.raises(InvalidInput, match=rf"of the task 'mine' must give {says}"):
        bad.train(Selection(clients=[0, 1]))
        bad.evaluate()
