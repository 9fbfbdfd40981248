"""Every policy that learns from reports, with clients that die, lie or answer late."""

import numpy as np
import pytest

from fedpick import Outcome, Session, policies
from fedpick.core import state as states
from fedpick.testing.federation import FakeFederation

POLICIES = (
    *("herd", "oort", "fedau", "fedcbs", "tifl", "refl", "clustered-size", "clustered-updates", "optimal-sampling"),
    *("k-vib", "divfl", "hics"),
)
COUNT, BUDGET, ROUNDS = 20, 6, 120
DEAD, LIARS, LATE = [0, 7], [1, 8], [2, 9]
HONEST = np.setdiff1d(np.arange(COUNT), [*DEAD, *LIARS, *LATE])
ABSURD = (np.nan, np.inf, -np.inf, 1e300, -1e300, 0.0, -1.0)


def play(name, seed):
    """Return how often each client was chosen. Late clients answer every second time, and slowly."""
    federation = FakeFederation(num_clients=COUNT, seed=3)
    session = Session(policies.get(name), federation.clients(), seed=seed)
    rng = np.random.default_rng(seed)
    sketches = rng.normal(size=(COUNT, 6))
    counts = np.zeros(COUNT)
    for index in range(ROUNDS):
        available = rng.random(COUNT) < 0.9
        selection = session.ask(available=available, budget=BUDGET, measure=lambda probe: np.ones(len(probe.clients)))
        chosen = selection.clients
        assert available[chosen].all()
        assert len(np.unique(chosen)) == len(chosen)
        if selection.weights is not None:
            assert np.isfinite(selection.weights).all()
            assert (selection.weights >= 0).all()
        counts[chosen] += 1
        reports = {
            key: 1 + rng.random(len(chosen)) for key in ("loss", "train_loss", "loss_rms", "duration", "update_norm")
        }
        sketch = sketches[chosen] + 0.1 * rng.normal(size=(len(chosen), 6))
        liars, late = np.isin(chosen, LIARS), np.isin(chosen, LATE)
        for values in reports.values():
            values[liars] = rng.choice(ABSURD, liars.sum())
        sketch[liars] = rng.choice(ABSURD, (liars.sum(), 6))
        reports["duration"][late] = 1000.0
        completed = ~np.isin(chosen, DEAD) & ~(late & (index % 2 == 0))
        session.tell(Outcome(index=index, clients=chosen, completed=completed, sketch=sketch, **reports))
    for values in states.split(session.state)[0].values():
        assert not np.isinf(values).any()
    return counts


@pytest.mark.parametrize("name", POLICIES)
def test_bad_clients_do_not_displace_the_others(name):
    counts = play(name, seed=1)
    fair = counts.sum() / COUNT
    assert (counts[HONEST] > 0).all(), counts
    assert counts[HONEST].mean() > 0.6 * fair, counts
    assert counts[DEAD].max() < 2.5 * fair, counts
