"""Sessions: random policies, masks, reports, outcomes, growth, and a save and load in between."""

from dataclasses import fields, replace

import numpy as np
import pytest

from fedpick import Guard, Session
from fedpick.core import checkpoint, registry
from fedpick.core.errors import FedpickError, InvalidInput
from fedpick.core.session import SESSION_FILE
from fedpick.core.types import Outcome, aggregation_weights
from fedpick.testing.federation import FakeFederation
from tests.fuzz.damage import ODD_VALUES, both, changed_tree, damaged, pick, survives


def odd_policy(rng):
    name = pick(rng, list(registry.BUILT_IN))
    policy = registry.load(name)
    keys = [item.name for item in fields(policy) if item.init]
    options = {pick(rng, keys): pick(rng, ODD_VALUES)} if keys and rng.random() < 0.3 else {}
    return registry.get(name, **options)


def odd_numbers(rng, shape):
    """Of any size; half of them of a size that the session takes for a report."""
    values = rng.normal(size=shape) * 10.0 ** (rng.integers(-3, 9) if rng.random() < 0.5 else rng.integers(-300, 300))
    values[rng.random(shape) < 0.1] = np.nan
    values[rng.random(shape) < 0.05] = np.inf
    return values


def odd_outcome(rng, index, chosen, late, count):
    """What the chosen clients may report, and late answers of clients chosen before."""
    stale = rng.permutation(np.setdiff1d(late, chosen))[: int(rng.integers(3))]
    if rng.random() < 0.02:
        stale = np.array([count + 1])  # no such client
    clients = np.concatenate([chosen, stale]).astype(np.int64)
    size = len(clients)
    names = ("loss", "train_loss", "duration", "update_norm", "loss_rms")
    reports = {name: odd_numbers(rng, size) for name in names if rng.random() < 0.9}
    masks = {name: rng.random(size) < 0.1 for name in ("late", "cancelled") if rng.random() < 0.3}
    return Outcome(
        index=index if rng.random() < 0.97 else 3,
        clients=clients,
        completed=rng.random(size) < 0.7,
        sketch=odd_numbers(rng, (size, 4)),
        stale=np.arange(size) >= len(chosen),
        **reports,
        **masks,
    )


def infinite(session):
    """The names of saved values that are infinite."""
    arrays, plain = session.split()
    values = {**{name: value for name, value in arrays.items() if value.dtype.kind == "f"}, **plain}
    floats = {name: value for name, value in values.items() if isinstance(value, float | np.ndarray)}
    return {name for name, value in floats.items() if np.isinf(value).any()}


def play_honest_rounds(session, federation, rounds=3):
    """Whatever clients reported before, honest rounds are decided as usual."""
    for _ in range(rounds):
        count, index = len(session.clients), session.round
        selection = session.ask(budget=2, measure=federation.measure(index, count))
        # more-available and ca-fed may exclude all clients that are offered, and say so.
        assert len(selection.clients) > 0 or selection.diagnostics.get("excluded")
        weights = aggregation_weights(selection, np.ones(len(selection.clients), bool), session.clients)
        assert np.isfinite(weights).all()
        assert (weights >= 0).all()
        assert weights.sum() > 0 or len(weights) == 0
        session.tell(federation.outcome(index, selection))
        assert infinite(session) == set()


def odd_rounds(session, federation, rng, directory):
    """Play up to five rounds of anything; return the session, which a save and load replaces."""
    before = np.empty(0, np.int64)
    for index in range(int(rng.integers(1, 6))):
        count = len(session.clients)

        def measure(probe, rng=rng):
            width = () if probe.signal.value == "loss" else (4,)
            return odd_numbers(rng, (len(probe.clients), *width)) if rng.random() < 0.9 else pick(rng, ODD_VALUES)

        mask = rng.random(count) < rng.random() if rng.random() < 0.95 else pick(rng, ODD_VALUES)
        budget = int(rng.integers(0, 8)) if rng.random() < 0.9 else pick(rng, ODD_VALUES)
        try:
            selection = session.ask(available=mask, budget=budget, measure=measure)
            chosen = selection.clients
            assert len(np.unique(chosen)) == len(chosen)
            assert mask is None or np.asarray(mask)[chosen].all()
            outcome = odd_outcome(rng, index, chosen, before, count)
            session.tell(session.judge(outcome) if rng.random() < 0.5 else outcome)
        except FedpickError as error:
            assert str(error)
            return session  # a refused call leaves a session that works
        before = np.union1d(before, chosen)
        assert ((session.credibility >= 0) & (session.credibility <= 1)).all()
        assert infinite(session) == set()
        if rng.random() < 0.2:
            grown = federation.clients(count + int(rng.integers(3)))
            groups = rng.integers(3, size=len(grown)) if rng.random() < 0.5 else None
            session.grow(replace(grown, group=groups))
        if rng.random() < 0.05 and count > 1:
            with pytest.raises(InvalidInput):
                session.grow(federation.clients(count - 1))
        if rng.random() < 0.2:
            session.save(directory)
            session = Session.load(directory)
    return session


def session_case(tmp_path):
    def case(rng):
        federation = FakeFederation(num_clients=int(rng.integers(1, 12)), seed=int(rng.integers(100)))
        policy, seed = odd_policy(rng), int(rng.integers(100))
        guard = ("off", "mild", "strict", Guard(most_places=1.5, newcomers=True))[seed % 4]
        clients = replace(federation.clients(), group=rng.integers(3, size=len(federation.clients())))
        session = Session(policy, clients, seed=seed, guard=guard)
        session = odd_rounds(session, federation, rng, tmp_path / "state")
        try:
            play_honest_rounds(session, federation)
        except FedpickError as error:
            raise AssertionError(f"{session}: {error}") from error

    return case


@both
def test_sessions(tmp_path, cases):
    survives(session_case(tmp_path), cases, seed=1)


@both
def test_policies_with_odd_parameters(cases):
    assert survives(odd_policy, cases, seed=2) > cases // 50


def resealed(content, rng):
    """Damage under a checksum that matches: in the bytes of the archive, or in the plain values."""
    if rng.random() < 0.5:
        body = damaged(content[: -checkpoint._COMMENT_SIZE], rng)
        return body + checkpoint._LABEL + checkpoint._digest(body)
    arrays, plain = checkpoint.unpack(content)
    odd = changed_tree(plain, rng)
    arrays.pop(pick(rng, list(arrays)) if rng.random() < 0.2 else None, None)
    return checkpoint.pack(arrays, odd if isinstance(odd, dict) else {})


@both
def test_state_directories(tmp_path, cases):
    clients = FakeFederation().clients()
    contents = []
    for name in ("afl", "fedcor", "ca-fed"):
        session = Session(registry.get(name), clients, seed=1)
        session.save(tmp_path / name)
        contents.append((tmp_path / name / SESSION_FILE).read_bytes())
    file = tmp_path / "damaged" / SESSION_FILE
    file.parent.mkdir()

    def case(rng):
        file.write_bytes(pick(rng, [damaged, resealed, resealed])(pick(rng, contents), rng))
        session = Session.load(file.parent)
        mask = rng.random(len(session.clients)) < 0.7
        session.ask(available=mask, budget=3, measure=lambda probe: rng.random(len(probe.clients)))

    assert survives(case, cases, seed=3) > 0.6 * cases
