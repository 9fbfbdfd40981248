"""What holds for every process: any round, in any order, the same mask; and a million clients."""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from fedpick import availability
from fedpick.availability.statistics import measure_trace
from fedpick.core.errors import FedpickError, InvalidInput
from fedpick.core.types import Clients


def table(num_clients=60):
    rng = np.random.default_rng(0)
    return Clients(
        num_examples=rng.integers(1, 100, num_clients), label_histogram=rng.integers(0, 2, (num_clients, 5)) * 3.0
    )


@pytest.fixture
def logs_file(tmp_path):
    rng = np.random.default_rng(1)
    times = np.sort(rng.integers(0, 3 * 86400, (7, 40)), axis=1)
    states = np.tile([2, 0], (7, 20))
    path = tmp_path / "logs.npz"
    np.savez(path, offsets=np.arange(8) * 40, t=times.ravel(), state=states.ravel())
    return str(path)


@pytest.fixture(params=[*availability.names(), "markov-negative", "markov-frozen", "homogeneous-redraw"])
def process(request, logs_file):
    special = {
        "trace": ("trace", {"path": logs_file, "round_seconds": 300}),
        "markov": ("markov", {"correlation": np.linspace(0, 0.99, 60)}),
        "markov-negative": ("markov", {"availability": 0.4, "correlation": -0.6}),
        "markov-frozen": ("markov", {"correlation": [1.0, -1.0] * 30}),
        "homogeneous-redraw": ("homogeneous", {"beta": 0.99, "redraw": True}),
    }
    name, parameters = special.get(request.param, (request.param, {}))
    return availability.get(name, **parameters)


def test_a_round_is_the_same_whichever_rounds_were_asked_before(process):
    clients, rounds = table(), 60
    forward = process.start(clients, seed=9)
    expected = np.array([forward.mask(t) for t in range(rounds)])
    backward = process.start(clients, seed=9)
    np.testing.assert_array_equal([backward.mask(t) for t in reversed(range(rounds))], expected[::-1])
    jumping = process.start(clients, seed=9)
    for t in np.random.default_rng(3).integers(0, rounds, 150):
        np.testing.assert_array_equal(jumping.mask(t), expected[t])
    for t in (0, 17, rounds - 1):
        np.testing.assert_array_equal(process.start(clients, seed=9).mask(t), expected[t])


def test_masks_are_read_only_booleans_and_differ_between_seeds(process):
    clients = table()
    trace = process.start(clients, seed=9)
    mask = trace.mask(4)
    assert mask.shape == (60,)
    assert mask.dtype == np.bool_
    with pytest.raises(ValueError, match="read-only"):
        mask[0] = True
    if type(process).__name__ != "Ideal":
        other = process.start(clients, seed=10)
        assert any((trace.mask(t) != other.mask(t)).any() for t in range(40))


def test_the_truth_fits_into_the_table(process):
    clients = table()
    told = process.start(clients, seed=9).oracle(clients)
    assert told.availability.shape == told.correlation.shape == (60,)
    np.testing.assert_array_equal(told.num_examples, clients.num_examples)


def test_long_run_rates_agree_with_the_stated_availability(process):
    if getattr(process, "redraw", False):  # raises the rates on purpose
        process = replace(process, redraw=False)
    clients = table()
    trace = process.start(clients, seed=21)
    rounds = 3000
    measured = measure_trace(trace, rounds, max_lag=1).rates.mean()
    # Standard error of the mean over clients: at most that of 10 chains (clusters) with lambda = 0.9 each, 0.0131 for
    # 10 x 3000 rounds; the bound is five of these. |lambda| = 1 never mixes: 60 coin flips, 5 x 0.065.
    frozen = np.mean(np.abs(trace.correlation) == 1)
    assert abs(measured - trace.availability.mean()) < 0.066 + 0.26 * frozen


@pytest.mark.parametrize("round", [-1, 1.5, True, "3"])
def test_a_round_is_a_whole_number(round):
    with pytest.raises(InvalidInput, match="round"):
        availability.get("ideal").start(table(), seed=0).mask(round)


@pytest.mark.parametrize("name", ["homogeneous", "markov", "trace"])
def test_newcomers_do_not_change_what_the_others_do(name, logs_file):
    parameters = {"path": logs_file} if name == "trace" else {}
    process = availability.get(name, **parameters)
    few, many = (process.start(table(count), seed=5) for count in (60, 90))
    for t in (0, 3, 4, 50):
        np.testing.assert_array_equal(few.mask(t), many.mask(t)[:60])


def test_measure_trace_equals_the_plain_formula():
    trace = availability.get("markov", correlation=0.5).start(table(), seed=1)
    rounds, lag = 300, 7
    measured = measure_trace(trace, rounds, start=20, max_lag=lag)
    masks = np.array([trace.mask(20 + t) for t in range(rounds)], dtype=float)
    np.testing.assert_allclose(measured.rates, masks.mean(axis=0))
    np.testing.assert_array_equal(measured.available, masks.sum(axis=1))
    variance = masks.var(axis=0).sum()
    for h in range(lag + 1):
        early, late = masks[: rounds - h], masks[h:]
        covariance = ((early - early.mean(axis=0)) * (late - late.mean(axis=0))).mean(axis=0)
        assert measured.autocorrelation[h] == pytest.approx(covariance.sum() / variance)
    assert measured.empty_rounds == 0


@pytest.mark.parametrize("name", ["homogeneous", "y-cycle", "sin-log-normal", "correlated-population", "trace"])
def test_a_million_clients_never_hold_the_matrix(name, logs_file):
    count = 1_000_000
    histogram = np.zeros((count, 2))
    histogram[np.arange(count), np.arange(count) % 2] = 1
    clients = Clients(num_examples=np.ones(count), label_histogram=histogram)
    parameters = {"path": logs_file} if name == "trace" else {}
    trace = availability.get(name, **parameters).start(clients, seed=0)
    trace.mask(0)
    tracemalloc.start()
    begin = time.perf_counter()
    for t in range(1, 4):
        assert trace.mask(t).shape == (count,)
    spent = time.perf_counter() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80e6  # a thousand masks would be 1000 MB
    assert spent < 5


def test_a_million_chains_reach_a_far_round_directly():
    clients = Clients(num_examples=np.ones(1_000_000))
    trace = availability.get("markov", availability=0.5, correlation=0.3).start(clients, seed=0)
    far = trace.mask(10**9)  # nobody could step there
    assert 498_000 < far.sum() < 502_000  # four standard deviations


def test_measure_trace_holds_masks_and_no_tables_of_numbers():
    trace = availability.get("markov", availability=0.5, correlation=0.2).start(
        Clients(num_examples=np.ones(20_000)), seed=0
    )
    tracemalloc.start()
    measure_trace(trace, 60, max_lag=50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200 * 20_000  # 101 masks and a few vectors


OWN = """
from dataclasses import dataclass
from fedpick.availability import AvailabilityProcess, get

def nights(rate: float = 0.5):
    return get("homogeneous", beta=rate)

def wrong():
    return 3
"""


def test_a_process_of_the_user_is_named_by_its_import_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_nights.py").write_text(OWN)
    assert availability.get("own_nights:nights", rate=0.25) == availability.get("homogeneous", beta=0.25)
    with pytest.raises(InvalidInput, match=r"has no parameter 'nosuch'. It has: rate"):
        availability.get("own_nights:nights", nosuch=1)
    with pytest.raises(InvalidInput, match=r"must return a .*AvailabilityProcess. Got int"):
        availability.get("own_nights:wrong")
    with pytest.raises(FedpickError, match="nosuch"):
        availability.get("own_nights:nosuch")
