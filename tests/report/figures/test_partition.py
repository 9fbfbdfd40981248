from __future__ import annotations

import sys

import numpy as np
import pytest

from fedpick import data
from fedpick.core.errors import InvalidInput, MissingDependency
from fedpick.report.figures.partition import _bars, draw_partition


def federation(name="dirichlet-class", num_clients=20):
    return data.partition(data.load("digits"), name, num_clients=num_clients)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_written(tmp_path, suffix):
    path = draw_partition(federation(), tmp_path / f"folder/picture.{suffix}")
    assert path.stat().st_size > 5000
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_bars_are_the_clients_largest_first():
    dealt = federation()
    heights, group = _bars(dealt)
    assert group == 1 and heights.shape == (20, 10)
    assert np.array_equal(heights.sum(axis=1), np.sort(dealt.sizes)[::-1])
    assert np.array_equal(heights.sum(axis=0), dealt.label_histogram.sum(axis=0))


def test_many_clients_are_drawn_as_means_of_neighbours():
    dealt = federation("iid", 1001)
    heights, group = _bars(dealt)
    assert heights.shape == (200, 10) and group == 5
    assert heights.sum(axis=1).mean() == pytest.approx(dealt.sizes.mean(), rel=0.01)


def test_a_set_without_labels_is_drawn_by_size(tmp_path):
    dealt = data.partition(data.load("quadratic"), "natural")
    assert _bars(dealt)[0].shape == (30, 1)
    assert draw_partition(dealt, tmp_path / "quadratic.png").is_file()


def test_other_endings_and_a_missing_library_are_told(tmp_path, monkeypatch):
    with pytest.raises(InvalidInput, match=r"must end in \.png"):
        draw_partition(federation(), tmp_path / "picture.doc")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"fedpick\[report\]"):
        draw_partition(federation(), tmp_path / "picture.png")
