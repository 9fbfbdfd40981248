from __future__ import annotations

import warnings

import numpy as np
import pytest

import fedpick
from fedpick import Clients, Outcome, Session
from fedpick.core.errors import FedpickWarning

CLIENTS = Clients(num_examples=np.arange(1.0, 7.0))
LOSSES = np.array([0.9, 2.1, 0.4, 1.7, 1.2, 3.0])


def play(session, rounds, measure=None, completed=True, **reports):
    """Return the warnings of some rounds; a report is given as its values for all clients."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(rounds):
            chosen = session.ask(budget=2, measure=measure).clients
            given = {name: values[chosen] for name, values in reports.items()}
            told = Outcome(index=session.round, clients=chosen, completed=np.full(len(chosen), completed), **given)
            session.tell(told)
    assert all(issubclass(warning.category, FedpickWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [("afl", {}, "loss"), ("afl", {"report": "train-loss"}, "train_loss"), ("rpow-d", {}, "train_loss")],
)
def test_a_report_that_never_comes_is_one_warning(name, options, field):
    session = Session(fedpick.policies.get(name, **options), CLIENTS)
    other = {"loss": "train_loss", "train_loss": "loss"}[field]
    assert play(session, 2, **{other: LOSSES}) == []
    (said,) = play(session, 8, **{other: LOSSES})
    assert said.startswith(f"{name} needs Outcome.{field}, and no client reported it in 3 rounds.")
    assert f"session.tell(Outcome(..., {field}=...))" in said
    assert play(Session(fedpick.policies.get(name, **options), CLIENTS), 8, **{field: LOSSES}) == []


def test_missing_sketches_name_what_works_under_secure_aggregation():
    (said,) = play(Session(fedpick.policies.get("herd"), CLIENTS), 3)
    assert said.startswith("herd needs Outcome.sketch")
    assert 'secure aggregation the server sees no single update: use herd with source="labels", "features"' in said
    assert play(Session(fedpick.policies.get("herd", source="none"), CLIENTS), 3) == []


def test_rounds_without_a_completed_client_do_not_count_and_one_report_starts_again():
    session = Session(fedpick.policies.get("afl"), CLIENTS)
    assert play(session, 5, completed=False) == []
    for _ in range(3):
        assert play(session, 2) == []
        assert play(session, 1, loss=LOSSES) == []
    assert len(play(session, 3)) == 1


def test_a_warning_raised_as_an_error_leaves_a_committed_round():
    session = Session(fedpick.policies.get("afl"), CLIENTS)
    play(session, 2)
    with pytest.raises(FedpickWarning):  # the tests turn warnings into errors
        session.tell(Outcome(index=2, clients=session.ask(budget=1).clients, completed=[True]))
    assert session.round == 3
    assert play(session, 3) == []


def test_a_probe_that_no_client_answers_is_one_warning():
    session = Session(fedpick.policies.get("pow-d", num_candidates=4), CLIENTS)

    def silent(probe):
        return np.full(len(probe.clients), np.nan)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            session.ask(budget=2, measure=silent)  # asking again is not another round
    assert play(session, 2, measure=silent) == []
    (said,) = play(session, 5, measure=silent)
    assert said.startswith("pow-d asks clients for 'loss', and none answered in 3 rounds.")


def fedcor(**options):
    return fedpick.policies.get(
        "fedcor", warmup=1, interval=2, dimension=2, warmup_iterations=1, iterations=1, **options
    )


def test_a_measure_that_ignores_trials_is_one_warning():
    def ignores(probe):
        return LOSSES[probe.clients]

    def tries(probe):
        return LOSSES[probe.clients] - (0.0 if probe.trial is None else 0.01)

    (said,) = play(Session(fedcor(), CLIENTS), 8, measure=ignores)
    assert said.startswith("fedcor asks for losses after a trial cohort, and `measure` returned")
    assert "train probe.trial.clients" in said
    assert play(Session(fedcor(), CLIENTS), 8, measure=tries) == []
    assert play(Session(fedcor(updates="round"), CLIENTS), 8, measure=ignores) == []


def test_a_driver_that_states_its_signals_is_watched_too():
    signals = frozenset(fedpick.Signal) - {fedpick.Signal.TRIAL}
    session = Session(fedpick.policies.get("afl"), CLIENTS, provides=signals)
    assert play(session, 2) == []
    (said,) = play(session, 8)
    assert said.startswith("afl needs Outcome.loss, which the driver states that it provides, and no client reported")
    assert play(Session(fedpick.policies.get("afl"), CLIENTS, provides=signals), 8, loss=LOSSES) == []
    session = Session(fedpick.policies.get("pow-d", num_candidates=4), CLIENTS, provides=signals)
    (said,) = play(session, 8, measure=lambda probe: np.full(len(probe.clients), np.nan))
    assert said.startswith("pow-d asks clients for 'loss', which the driver states that it provides, and none answered")


def test_trials_that_change_nothing_now_and_then_are_no_warning():
    trials = []

    def tries(probe):
        trials.append(probe.trial is not None)
        return LOSSES[probe.clients] - (0.01 if probe.trial is not None and sum(trials) % 3 == 0 else 0.0)

    assert play(Session(fedcor(), CLIENTS), 30, measure=tries) == []
    assert sum(trials) > 8
