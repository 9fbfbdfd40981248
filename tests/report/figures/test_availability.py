from __future__ import annotations

import numpy as np
import pytest

from fedpick import availability
from fedpick.core.errors import InvalidInput, MissingDependency, UnknownName
from fedpick.report.figures.availability import (
    _draw_raster,
    draw_availability,
    example_clients,
    show_availability,
)

pytest.importorskip("matplotlib")


# One of each kind: constant, independent, periodic, correlated, in groups. All take the same path to the picture.
@pytest.mark.parametrize("name", ["ideal", "homogeneous", "y-cycle", "clustered", "alternating-groups"])
def test_every_kind_of_trace_can_be_drawn(name, tmp_path):
    measured = show_availability(name, tmp_path / "sub" / "mode.png", num_clients=40, rounds=60)
    assert (tmp_path / "sub" / "mode.png").read_bytes().startswith(b"\x89PNG")
    assert measured.rates.shape == (40,)
    assert measured.available.shape == (60,)


def test_the_same_trace_is_the_same_picture(tmp_path):
    for path in ("a.png", "b.png"):
        show_availability("markov", tmp_path / path, num_clients=20, rounds=30, parameters={"correlation": 0.5})
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_raster_shows_the_mask_of_each_client_and_round():
    from matplotlib.figure import Figure

    clients = example_clients(30)
    trace = availability.get("homogeneous").start(clients, 0)
    axes = Figure().add_subplot()
    raster = np.stack([trace.mask(5 + t) for t in range(12)], axis=1)
    _draw_raster(axes, raster, 30, 5)
    (image,) = axes.get_images()
    assert image.get_extent() == [4.5, 16.5, -0.5, 29.5]
    np.testing.assert_array_equal(np.asarray(image.get_array(), dtype=bool)[:, 3], trace.mask(8))


def test_many_clients_are_thinned_in_the_raster_only(tmp_path):
    clients = example_clients(3000)
    trace = availability.get("homogeneous").start(clients, 0)
    assert draw_availability(trace, clients, 20, tmp_path / "many.svg").rates.shape == (3000,)
    assert "<svg" in (tmp_path / "many.svg").read_text()


def test_what_cannot_be_drawn_is_said(tmp_path, monkeypatch):
    clients = example_clients(5)
    trace = availability.get("ideal").start(clients, 0)
    with pytest.raises(InvalidInput, match="2 rounds"):
        draw_availability(trace, clients, 1, tmp_path / "x.png")
    with pytest.raises(InvalidInput, match="5 clients, the table 9"):
        draw_availability(trace, example_clients(9), 5, tmp_path / "x.png")
    with pytest.raises(UnknownName, match="clustered"):
        show_availability("cluster", tmp_path / "x.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependency, match=r"fedpick\[report\]"):
        draw_availability(trace, clients, 5, tmp_path / "x.png")
