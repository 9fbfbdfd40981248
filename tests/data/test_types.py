"""Data of users: mistakes are refused when the record is built, not rounds later."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from fedpick import data
from fedpick.core.errors import InvalidInput
from fedpick.data import Dataset

X = np.arange(24, dtype=np.float32).reshape(6, 4)


def own(**changes) -> Dataset:
    fields = {
        "name": "mine",
        "train_x": X,
        "train_y": np.array([0, 1, 2, 0, 1, 2]),
        "test_x": X[:2],
        "test_y": np.array([0, 1]),
        "num_classes": 3,
    }
    return Dataset(**{**fields, **changes})


def with_value(value, row=4, dtype=np.float32):
    x = X.astype(dtype)
    x[row, 2] = value
    return x


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train_x": with_value(np.nan)}, r"train_x must be finite numbers.*row 4.*nan.*Drop or fill"),
        ({"train_x": with_value(-np.inf, row=0)}, r"train_x must be finite numbers.*row 0.*-inf"),
        ({"test_x": with_value(np.inf)[3:], "test_y": [0, 1, 2]}, r"test_x must be finite numbers.*row 1.*inf"),
        ({"train_x": X.astype(np.float64)}, r"train_x.*uint8 or float32.*Got float64.*astype"),
        ({"train_x": X.astype(int).astype(str)}, r"train_x.*uint8 or float32.*Got <U"),
        ({"test_x": X[:2].astype(np.uint8)}, r"test_x is uint8 and train_x float32.*same scale"),
        ({"test_x": X[:2, :3]}, r"examples of one shape.*train_x has \(4,\).*test_x has \(3,\)"),
        ({"test_x": X[:2].reshape(2, 2, 2)}, r"one shape.*\(4,\).*\(2, 2\)"),
        ({"train_y": [0, 1, 2, 0, 1.9, 2]}, r"train_y.*whole numbers.*1\.9"),
        ({"train_y": [0, 1, np.nan, 0, 1, 2]}, r"train_y.*whole numbers.*nan"),
        ({"train_y": list("abcabc")}, r"train_y.*whole numbers.*text.*np\.unique"),
        ({"train_y": np.array(list("abcabc"), dtype=object)}, r"train_y.*whole numbers.*np\.unique"),
        ({"train_y": [0, 1, 3, 0, 1, 2]}, r"train_y.*in 0\.\.2.*Got 0 to 3"),
        ({"train_y": [0, 1, -1, 0, 1, 2]}, r"train_y.*in 0\.\.2.*Got -1 to 2"),
        ({"train_y": np.array([0, 1, 2**32, 0, 1, 2])}, r"train_y.*in 0\.\.2.*Got 0 to 4294967296"),
        ({"test_y": [0, 7]}, r"test_y.*in 0\.\.2.*Got 0 to 7"),
        ({"train_y": [0, 1, 2]}, r"one label per example, shape \(6,\).*\(3,\)"),
        ({"train_y": np.eye(3)[[0, 1, 2, 0, 1, 2]]}, r"one label per example.*argmax"),
        ({"num_classes": 0, "train_y": [0, 1, 2, 0, 1, np.inf]}, r"train_y must be finite numbers.*row 5"),
        ({"num_classes": 2.5}, r"num_classes.*whole number.*2\.5"),
        ({"num_classes": -1}, r"num_classes.*whole number.*-1"),
        ({"std": 0.0}, r"std.*above 0.*0\.0.*1 for a feature that never changes"),
        ({"std": X.std(axis=0) * np.array([1, 1, 0, 1])}, r"std.*above 0"),
        ({"std": np.nan}, r"std.*above 0.*nan"),
        ({"mean": np.inf}, r"mean.*finite.*inf"),
        ({"mean": np.zeros(3)}, r"mean.*one number, or one per.*\(3,\)"),
        ({"scale": 0.0}, r"scale.*finite.*0\.0"),
        ({"scale": np.nan}, r"scale.*finite.*nan"),
        ({"groups": np.array([0, 1, np.nan, 0, 1, 2])}, r"groups.*owner of every training example.*nan"),
        ({"train_x": X[:0], "train_y": []}, "no training examples"),
        ({"train_x": 3.0}, r"train_x must be an array with one row per example.*shape \(\)"),
        ({"train_x": [[1.0, 2.0], [3.0]]}, r"train_x must be an array with one row per example.*inhomogeneous"),
    ],
)
def test_what_cannot_be_right_is_refused(changes, says):
    with pytest.raises(InvalidInput, match=says):
        own(**changes)


@pytest.mark.parametrize("labels", [[0.0, 1.0, 2.0, 0.0, 1.0, 2.0], np.array([0, 1, 2, 0, 1, 2], np.int64), [0, 1] * 3])
def test_labels_of_any_type_that_are_whole_become_int32(labels):
    dataset = own(train_y=labels)
    assert dataset.train_y.dtype == np.int32
    assert dataset.train_y.tolist() == [int(label) for label in labels]
    assert own(train_y=np.array([0, 1] * 3, bool), num_classes=2).train_y.tolist() == [0, 1] * 3


def test_a_mean_and_deviation_per_feature_or_pixel():
    dataset = own(mean=X.mean(axis=0), std=X.std(axis=0))
    assert dataset.normalized(X).mean(axis=0) == pytest.approx(0, abs=1e-6)
    images = np.zeros((6, 5, 5, 3), np.uint8)
    assert own(train_x=images, test_x=images[:2], mean=[0.1, 0.2, 0.3]).mean.shape == (3,)


def test_a_test_set_may_be_left_out():
    dataset = Dataset(name="mine", train_x=X, train_y=[0, 1, 2, 0, 1, 2], num_classes=3)
    assert dataset.test_x.shape == (0, 4) and len(dataset.test_y) == 0
    # An empty one says nothing about the shape of examples.
    assert own(test_x=np.empty(0), test_y=np.empty(0)).test_x.shape == (0, 4)
    whole = data.partition(dataset, "iid", num_clients=2)
    assert len(whole.test_y) == 0
    split = data.partition(dataset, "iid", num_clients=2, split=(0.4, 0.0, 0.6))
    assert len(split.test_y) == 4


@pytest.mark.parametrize("bad", [False, True])
def test_looking_for_nan_makes_no_copy_of_the_data(bad):
    x = np.ones((200_000, 20), np.float32)  # 16 MB
    labels = np.zeros(len(x), np.int32)
    x[-1, -1] = np.nan if bad else 1.0
    tracemalloc.start()
    try:
        Dataset(name="large", train_x=x, train_y=labels, num_classes=1)
        assert not bad
    except InvalidInput as error:
        assert bad and "row 199999" in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 4e6


def test_bytes_are_not_looked_at():
    x, labels = np.zeros((2_000_000, 1), np.uint8), np.zeros(2_000_000, np.int32)
    tracemalloc.start()
    Dataset(name="large", train_x=x, train_y=labels, num_classes=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6
