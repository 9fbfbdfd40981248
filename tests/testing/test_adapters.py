"""The conformance kit for adapters: a right one passes, and each way to be wrong is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedpick.core.errors import AdapterCheckFailed
from fedpick.core.types import aggregation_weights
from fedpick.testing import adapters, check_adapter
from fedpick.testing.adapters import AdapterRun, reference


def test_a_plain_loop_passes():
    check_adapter(reference)


def forgets_the_state(case):
    return reference(replace(case, state=None))


def ignores_the_seed(case):
    return reference(replace(case, seed=0))


def one_round_more(case):
    return reference(replace(case, rounds=case.rounds + 1))


def raises_when_a_client_does(case):
    if any(client.fault or client.first_fault for client in case.clients):
        raise ConnectionError("a client is gone")
    return reference(case)


def says_that_all_completed(case):
    run = reference(case)
    return AdapterRun(cohorts=run.cohorts, completed=run.cohorts, model=run.model)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (forgets_the_state, "^resumes: a resumed run with rpow-d|^resumes: a resumed run: in round 5 the cohort"),
        (ignores_the_seed, "same_decisions: the rounds with uniform: in round 1 the cohort"),
        (one_round_more, "7 rounds were run instead of 6"),
        (raises_when_a_client_does, "failures_are_told ended in ConnectionError: a client is gone"),
        (says_that_all_completed, "failures_are_told: .* the clients that completed were"),
    ],
)
def test_each_way_to_be_wrong_is_named(run, sentence):
    with pytest.raises(AdapterCheckFailed, match=sentence):
        check_adapter(run)


def test_weights_that_are_normalised_or_ignore_sizes_are_found(monkeypatch):
    def normalised(selection, completed, clients):
        weights = aggregation_weights(selection, completed, clients)
        return weights / weights.sum() if weights.sum() else weights

    def equal(selection, completed, clients):
        return np.where(completed, 1 / max(completed.sum(), 1), 0.0)

    for wrong, sentence in ((normalised, "do not sum to 1 with unbiased"), (equal, "weights by size with uniform")):

        def run(case, wrong=wrong):
            with monkeypatch.context() as patch:
                patch.setattr(adapters, "aggregation_weights", wrong)
                return reference(case)

        with pytest.raises(AdapterCheckFailed, match=sentence):
            adapters.exact_weights(run)


def test_probes_of_another_model_are_found():
    def run(case):
        for client in case.clients:
            client.loss = lambda model, client=client: client.target  # of no model at all
        return reference(case)

    with pytest.raises(AdapterCheckFailed, match="pow-d"):
        adapters.same_decisions(run)
