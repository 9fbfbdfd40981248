"""The independent modes and the groups: rates against the formulas, written out once more by hand.

Statistical tests run at fixed seeds. Each compares every cell (client or round phase) with its exact binomial law; the
threshold is set so that a correct implementation would fail at fewer than one seed in a million (Bonferroni over
cells).
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from fedpick import availability
from fedpick.core.errors import InvalidInput, UnknownName
from fedpick.core.types import Clients

FALSE_ALARM = 1e-6


def table(num_clients=12, seed=5, num_labels=4):
    rng = np.random.default_rng(seed)
    histogram = np.zeros((num_clients, num_labels))
    for client in range(num_clients):
        histogram[client, rng.choice(num_labels, 2, replace=False)] = rng.integers(1, 9, 2)
    return Clients(num_examples=rng.integers(5, 500, num_clients), label_histogram=histogram)


def assert_binomial(successes, trials, rates):
    successes, rates = np.ravel(successes), np.ravel(rates)
    surprise = 2 * np.minimum(stats.binom.cdf(successes, trials, rates), stats.binom.sf(successes - 1, trials, rates))
    assert surprise.min() > FALSE_ALARM / surprise.size


CLIENTS = table()
SIZES = CLIENTS.num_examples
HAS = CLIENTS.label_histogram > 0
SMALLEST = np.array([min(label for label in range(4) if row[label]) for row in HAS])


@pytest.mark.parametrize(
    ("name", "beta", "rates"),
    [
        ("ideal", None, np.ones(12)),
        ("homogeneous", 0.3, np.full(12, 0.7)),
        ("more-data-first", 0.7, SIZES**0.7 / (SIZES**0.7).max()),
        ("less-data-first", 0.7, SIZES**-0.7 / (SIZES**-0.7).max()),
        ("y-max-first", 0.9, 0.9 * SMALLEST / 3 + 0.1),
    ],
)
def test_constant_rates_match_the_formula(name, beta, rates):
    trace = availability.get(name, **({} if beta is None else {"beta": beta})).start(CLIENTS, seed=11)
    np.testing.assert_allclose(trace.availability, rates, rtol=1e-12)
    assert (trace.correlation == 0).all()
    rounds = 4000
    assert_binomial(sum(trace.mask(t).astype(int) for t in range(rounds)), rounds, rates)


def test_log_normal_rates_are_log_normal_relative_to_the_largest():
    clients = Clients(num_examples=np.ones(20_000))
    trace = availability.get("log-normal", beta=0.5).start(clients, seed=2)
    logs = np.log(trace.availability)
    assert logs.max() == 0
    # log c_k ~ N(0, sigma^2), sigma = ln 2, shifted by a common constant: test the shape around the mean.
    centred = (logs - logs.mean()) / np.log(2)
    assert stats.kstest(centred, "norm").pvalue > FALSE_ALARM
    assert abs(centred.std() - 1) < stats.norm.isf(FALSE_ALARM / 2) / np.sqrt(2 * len(logs))
    rounds = 200
    total = sum(trace.mask(t).astype(int) for t in range(rounds))
    assert_binomial(total, rounds, trace.availability)
    other = availability.get("log-normal", beta=0.5).start(clients, seed=3)
    assert not np.array_equal(other.availability, trace.availability)


def test_sin_log_normal_rises_and_falls_in_both_readings():
    for phase, angles in (
        ("code", np.linspace(0, 2 * np.pi, 24)),
        ("paper", 2 * np.pi * (1 + np.arange(24)) / 24),
    ):
        base = availability.get("log-normal", beta=0.5).start(CLIENTS, seed=4).availability
        trace = availability.get("sin-log-normal", beta=0.5, phase=phase).start(CLIENTS, seed=4)
        rates = base * (0.4 * np.sin(angles) + 0.5)[:, np.newaxis]  # (24, N)
        np.testing.assert_allclose([trace.rates(t) for t in range(24, 48)], rates, rtol=1e-9)
        np.testing.assert_allclose(trace.availability, rates.mean(axis=0), rtol=1e-9)
        cycles = 400
        seen = np.array([trace.mask(t) for t in range(24 * cycles)]).reshape(cycles, 24, 12).sum(axis=0)
        assert_binomial(seen, cycles, rates)
    # In the authors' form the first and the last of the 24 phases coincide.
    trace = availability.get("sin-log-normal").start(CLIENTS, seed=4)
    np.testing.assert_allclose(trace.rates(0), trace.rates(23), rtol=1e-9)


def test_y_cycle_gives_every_label_its_turn():
    trace = availability.get("y-cycle", beta=0.9).start(CLIENTS, seed=1)
    assert trace.period == 40
    for t in range(80):
        share = (1 + t % 40) / 40
        (label,) = [y for y in range(4) if y / 4 < share <= (y + 1) / 4]
        np.testing.assert_allclose(trace.rates(t), 0.9 * HAS[:, label] + 0.1)
    cycles = 150
    seen = np.array([trace.mask(t) for t in range(40 * cycles)]).reshape(cycles, 40, 12).sum(axis=0)
    assert_binomial(seen, cycles, np.array([trace.rates(t) for t in range(40)]))
    # Two of four labels each: half of the time at rate 1, half at 0.1.
    np.testing.assert_allclose(trace.availability, 0.55)


def test_true_correlation_of_a_periodic_mode_is_what_the_masks_show():
    clients = table(400, seed=8)
    trace = availability.get("y-cycle", beta=0.9).start(clients, seed=1)
    masks = np.array([trace.mask(t) for t in range(4001)], dtype=float)
    mean = masks.mean()
    measured = ((masks[1:] - mean) * (masks[:-1] - mean)).mean() / (mean * (1 - mean))
    # 1.6 million products, nearly independent across the 400 clients: a standard error below 0.002.
    assert abs(measured - trace.correlation.mean()) < 0.01


def test_alternating_groups_leave_out_the_share_the_paper_and_the_supplement_say():
    clients = Clients(num_examples=np.ones(100))
    for excluded, left in ((0.1, 45), (0.2, 40)):
        trace = availability.get("alternating-groups", excluded=excluded).start(clients, seed=3)
        masks = np.array([trace.mask(t) for t in range(2000)])
        assert (masks.sum(axis=1) == left).all()
        assert not masks[0::2, 50:].any()
        assert not masks[1::2, :50].any()
        # Each client is left out of its own 1000 rounds with probability `excluded`, independently over rounds.
        assert_binomial(masks.sum(axis=0), 1000, np.full(100, 1 - excluded))
        np.testing.assert_allclose(trace.availability, (1 - excluded) / 2)
        np.testing.assert_allclose(trace.correlation, -trace.availability / (1 - trace.availability))


def test_nobody_available_is_what_the_mask_says():
    clients = Clients(num_examples=np.ones(3))
    plain = availability.get("homogeneous", beta=0.9).start(clients, seed=0)
    redrawn = availability.get("homogeneous", beta=0.9, redraw=True).start(clients, seed=0)
    empty = [t for t in range(200) if not plain.mask(t).any()]
    assert 120 < len(empty) < 170  # 0.9^3 of 200
    for t in range(200):
        if t in empty:
            assert redrawn.mask(t).any()
        else:
            np.testing.assert_array_equal(redrawn.mask(t), plain.mask(t))
    assert not availability.get("homogeneous", beta=1.0).start(clients, seed=0).mask(0).any()
    assert not availability.get("homogeneous", beta=1.0, redraw=True).start(clients, seed=0).mask(0).any()


def test_label_modes_say_what_they_miss():
    bare = Clients(num_examples=np.ones(3))
    for name in ("y-cycle", "y-max-first"):
        with pytest.raises(InvalidInput, match="label_histogram"):
            availability.get(name).start(bare, seed=0)
        with pytest.raises(InvalidInput, match="two labels"):
            availability.get(name).start(Clients(num_examples=[1.0], label_histogram=[[1.0]]), seed=0)


def test_clients_without_examples_have_a_rate():
    clients = Clients(num_examples=[0, 10, 40])
    np.testing.assert_allclose(availability.get("more-data-first").start(clients, 0).availability, [0, 0.25**0.7, 1])
    np.testing.assert_allclose(availability.get("less-data-first").start(clients, 0).availability, [1, 1, 0.25**0.7])


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("homogeneous", {"beta": 1.5}, "beta"),
        ("homogeneous", {"beta": "high"}, "beta"),
        ("homogeneous", {"beta": True}, "beta"),
        ("log-normal", {"beta": 1.0}, r"\[0, 1\)"),
        ("more-data-first", {"beta": -1}, "beta"),
        ("y-cycle", {"period": 0}, "period"),
        ("sin-log-normal", {"phase": "moon"}, "phase"),
        ("homogeneous", {"redraw": 1}, "redraw"),
        ("alternating-groups", {"num_groups": 0}, "num_groups"),
        ("alternating-groups", {"excluded": 1.1}, "excluded"),
        ("ideal", {"beta": 0.5}, "no parameter 'beta'"),
        ("markov", {"availability": [0.5, 1.5]}, "availability"),
        ("markov", {"correlation": "strong"}, "correlation"),
        ("correlated-population", {"variant": "mine"}, "variant"),
        ("clustered", {"num_clusters": 2.5}, "num_clusters"),
        ("trace", {}, "path"),
        ("trace", {"path": "x.npz", "round_seconds": 0}, "round_seconds"),
        ("trace", {"path": "x.npz", "format": "parquet"}, "format"),
        ("trace", {"path": "x.json", "requirements": ["5g"]}, "requirements"),
    ],
)
def test_wrong_parameters_are_refused_at_construction(name, parameters, says):
    with pytest.raises(InvalidInput, match=says):
        availability.get(name, **parameters)


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UnknownName, match="Did you mean 'log-normal'"):
        availability.get("lognormal")


def test_every_process_has_a_line_about_itself_and_a_source():
    for name in availability.names():
        assert availability.summary(name)
        assert name == "ideal" or "title=" in availability.load(name).reference


def test_the_package_needs_numpy_only():
    code = (
        "import sys, fedpick.availability.statistics;"
        "heavy = {'jax', 'matplotlib', 'plotly', 'pandas', 'flwr', 'sklearn'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
