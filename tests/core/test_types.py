from __future__ import annotations

import numpy as np
import pytest

from fedpick import Clients, Measurement, Outcome, Probe, RoundContext, Selection, Signal, aggregation_weights
from fedpick.core.errors import InvalidInput

FOUR = Clients(num_examples=np.array([1.0, 2.0, 3.0, 4.0]))


def test_importance_defaults_to_the_share_of_examples():
    np.testing.assert_allclose(FOUR.importance, [0.1, 0.2, 0.3, 0.4])


def test_arrays_are_read_only_and_the_callers_array_stays_writable():
    sizes = np.array([1.0, 2.0])
    clients = Clients(num_examples=sizes)
    with pytest.raises(ValueError, match="read-only"):
        clients.num_examples[0] = 5
    sizes[0] = 1.0  # still the caller's


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Clients(num_examples=np.array([])), "at least one entry"),
        (lambda: Clients(num_examples=np.array([1.0, -1.0])), "at least 0"),
        (lambda: Clients(num_examples=np.array([np.nan, 1.0])), "finite"),
        (lambda: Clients(num_examples=np.zeros(3)), "not all 0"),
        (lambda: Clients(num_examples=np.ones((2, 2))), r"shape \(any\)\. Got \(2, 2\)"),
        (lambda: Clients(num_examples=["many"]), "array of numbers"),
        (lambda: Clients(num_examples=[10**400]), "array of numbers"),
        (lambda: Clients(num_examples=np.ones(2), importance=np.array([0.9, 0.9])), "sum to 1"),
        (lambda: Clients(num_examples=np.ones(2), availability=np.array([0.5, 1.5])), r"\[0, 1\]"),
        (lambda: Clients(num_examples=np.ones(2), correlation=np.array([np.nan, 0])), r"\[-1, 1\]"),
        (lambda: Clients(num_examples=np.ones(2), label_histogram=np.ones((3, 2))), r"shape \(2, any\)"),
        (lambda: Clients(num_examples=np.ones(2), label_histogram=-np.ones((2, 2))), "at least 0"),
        (lambda: Clients(num_examples=np.ones(2), features=np.full((2, 1), np.inf)), "finite"),
        (lambda: Selection(clients=np.array([1, 1])), "unique. Client 1 appears 2 times"),
        (lambda: Selection(clients=np.array([-1])), "at least 0"),
        (lambda: Selection(clients=np.array([0.5])), "whole numbers"),
        (lambda: Selection(clients=np.array([1]), weights=np.array([np.inf])), "finite"),
        (lambda: Selection(clients=np.array([1]), weights=np.array([-0.1])), "at least 0"),
        (lambda: Selection(clients=np.array([1]), weights=np.array([0.5, 0.5])), "shape"),
        (lambda: Probe(clients=np.array([1]), batch_size=0), "at least 1"),
        (lambda: Measurement(clients=np.array([1, 2]), values=np.array([1.0])), "shape"),
        (lambda: RoundContext(index=0, budget=-1, available=np.ones(4, bool), clients=FOUR), "budget"),
        (lambda: RoundContext(index=0, budget=1, available=np.ones(3, bool), clients=FOUR), "shape"),
        (lambda: RoundContext(index=0, budget=1, available=np.array([0, 1, 2, 3]), clients=FOUR), "boolean mask"),
        (lambda: Outcome(index=0, clients=np.array([1]), completed=np.array([1])), "boolean mask"),
        (lambda: Outcome(index=0, clients=np.array([1]), completed=np.array([True]), loss=np.ones(2)), "shape"),
    ],
)
def test_bad_input_is_refused_with_what_was_expected(build, message):
    with pytest.raises(InvalidInput, match=message):
        build()


def test_what_an_outcome_leaves_out_is_nan():
    outcome = Outcome(index=0, clients=[2, 3], completed=np.array([True, False]))
    assert np.isnan(outcome.loss).all() and outcome.loss.shape == (2,)


def test_a_probe_accepts_a_signal_by_its_name():
    assert Probe(clients=[0], signal="update").signal is Signal.UPDATE


YES, NO = True, False


@pytest.mark.parametrize(
    ("weights", "renormalize", "completed", "expected"),
    [
        (None, True, [YES, YES, YES], [1 / 6, 2 / 6, 3 / 6]),
        (None, True, [YES, NO, YES], [1 / 4, 0, 3 / 4]),
        (None, False, [YES, NO, YES], [1 / 4, 0, 3 / 4]),
        ([0.2, 0.3, 0.5], True, [YES, YES, NO], [0.4, 0.6, 0]),
        ([0.2, 0.3, 0.5], False, [YES, YES, NO], [0.2, 0.3, 0]),
        ([2.0, 3.0, 5.0], True, [NO, YES, YES], [0, 3.75, 6.25]),  # back to the sum the policy gave: 10
        ([2.0, 3.0, 5.0], True, [NO, NO, NO], [0, 0, 0]),
        ([0.0, 0.0, 1.0], True, [YES, YES, NO], [0, 0, 0]),  # zero weight answered: no step
    ],
)
def test_aggregation_weights_by_hand(weights, renormalize, completed, expected):
    selection = Selection(clients=[0, 1, 2], weights=weights, renormalize=renormalize)
    np.testing.assert_allclose(aggregation_weights(selection, np.array(completed), FOUR), expected, atol=1e-15)


def test_aggregation_weights_of_clients_without_examples_make_no_step():
    clients = Clients(num_examples=np.array([0.0, 1.0]))
    np.testing.assert_array_equal(aggregation_weights(Selection(clients=[0]), np.array([True]), clients), [0.0])


def test_an_outcome_without_reports_is_nan_and_without_a_sketch():
    outcome = Outcome(index=0, clients=[1, 2], completed=np.array([True, False]))
    for name in ("loss", "train_loss", "duration", "update_norm", "loss_rms"):
        assert np.isnan(getattr(outcome, name)).all() and getattr(outcome, name).shape == (2,)
    assert outcome.sketch.shape == (2, 0)
    with pytest.raises(InvalidInput, match=r"Outcome\.sketch must have the shape \(2, any\)\. Got \(3, 4\)"):
        Outcome(index=0, clients=[1, 2], completed=np.array([True, False]), sketch=np.ones((3, 4)))
