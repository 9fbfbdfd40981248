"""Sessions: random policies, masks, reports, outcomes, growth, and a save and load in between."""

from dataclasses import fields, replace

import numpy as np

from fedpick import Guard, Session
from fedpick.core import checkpoint, registry
from fedpick.core.session import SESSION_FILE
from fedpick.core.types import Outcome
from fedpick.testing.federation import FakeFederation
from tests.fuzz.damage import ODD_VALUES, both, changed_tree, damaged, pick, survives


def odd_policy(rng):
    name = pick(rng, list(registry.BUILT_IN))
    policy = registry.load(name)
    keys = [item.name for item in fields(policy) if item.init]
    options = {pick(rng, keys): pick(rng, ODD_VALUES)} if keys and rng.random() < 0.3 else {}
    return registry.get(name, **options)


def odd_numbers(rng, shape):
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-300, 300)
    values[rng.random(shape) < 0.1] = np.nan
    values[rng.random(shape) < 0.05] = np.inf
    return values


def session_case(tmp_path):
    def case(rng):
        federation = FakeFederation(num_clients=int(rng.integers(1, 12)), seed=int(rng.integers(100)))
        policy, seed = odd_policy(rng), int(rng.integers(100))
        guard = ("off", "mild", "strict", Guard(most_places=1.5, newcomers=True))[seed % 4]
        clients = replace(federation.clients(), group=rng.integers(3, size=len(federation.clients())))
        session = Session(policy, clients, seed=seed, guard=guard)
        for index in range(int(rng.integers(1, 6))):
            count = len(session.clients)

            def measure(probe, rng=rng):
                width = () if probe.signal.value == "loss" else (4,)
                return odd_numbers(rng, (len(probe.clients), *width)) if rng.random() < 0.9 else pick(rng, ODD_VALUES)

            mask = rng.random(count) < rng.random() if rng.random() < 0.95 else pick(rng, ODD_VALUES)
            budget = int(rng.integers(0, 8)) if rng.random() < 0.9 else pick(rng, ODD_VALUES)
            selection = session.ask(available=mask, budget=budget, measure=measure)
            chosen = selection.clients
            assert len(np.unique(chosen)) == len(chosen)
            assert mask is None or np.asarray(mask)[chosen].all()
            size = len(chosen)
            outcome = Outcome(
                index=index if rng.random() < 0.97 else 3,
                clients=chosen,
                completed=rng.random(size) < 0.7,
                loss=odd_numbers(rng, size),
                train_loss=odd_numbers(rng, size),
                duration=odd_numbers(rng, size),
                update_norm=odd_numbers(rng, size),
                sketch=odd_numbers(rng, (size, 4)),
            )
            session.tell(session.judge(outcome) if rng.random() < 0.5 else outcome)
            assert ((session.credibility >= 0) & (session.credibility <= 1)).all()
            guarded = {name: value for name, value in session.split()[0].items() if name.startswith("guard/")}
            assert not any(np.isinf(value).any() for value in guarded.values())
            if rng.random() < 0.2:
                session.grow(federation.clients(count + int(rng.integers(-1, 3))))
            if rng.random() < 0.2:
                session.save(tmp_path / "state")
                session = Session.load(tmp_path / "state")

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
