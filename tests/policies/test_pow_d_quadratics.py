"""Figure 2 in small: the quadratics of appendix F, with a twentieth of the rounds at twenty times the learning rate."""

from __future__ import annotations

import numpy as np
import pytest

from fedpick import Clients, Outcome, Session, policies
from fedpick.core.rng import Purpose, stream
from fedpick.theory.pow_d import quadratics

ROUNDS = 1500
RATE = 4e-4


def excess_curve(policy, seed):
    """F - F* after every round; K = 30, m = 3, two full-gradient steps."""
    rng = stream(seed, 0, Purpose.DATA)
    curvature, linear = rng.uniform(1, 20, 30), rng.uniform(0, 100, (30, 5))
    clients = Clients(num_examples=rng.power(3, 30))
    w = 100 * rng.standard_normal(5)
    task = quadratics(curvature, linear, clients)
    centres, best = linear / curvature[:, None], clients.importance @ task.at(task.minimizer)
    session, curve = Session(policy, clients, seed=seed), np.empty(ROUNDS)
    for index in range(ROUNDS):
        losses = task.at(w)
        selection = session.ask(budget=3, measure=lambda probe, losses=losses: losses[probe.clients])
        chosen = selection.clients
        # Two steps of gradient descent bring w closer to the client's optimum by the square of 1 - rate * h.
        trained = centres[chosen] + (1 - RATE * curvature[chosen, None]) ** 2 * (w - centres[chosen])
        w = w + selection.weights @ (trained - w)
        session.tell(Outcome(index=index, clients=chosen, completed=np.ones(len(chosen), dtype=bool)))
        curve[index] = clients.importance @ task.at(w) - best
    return curve


@pytest.mark.parametrize("seed", [0, 1])
def test_more_candidates_are_faster_first_and_more_biased_in_the_end(seed):
    curves = {
        "rand": excess_curve(policies.get("md"), seed),
        **{d: excess_curve(policies.get("pow-d", num_candidates=d), seed) for d in (6, 15, 30)},
        "adapow-d": excess_curve(policies.get("adapow-d", halve_every=250), seed),
    }
    level = curves["rand"][249]
    reached = {name: int(np.argmax(curve <= level)) for name, curve in curves.items()}
    assert reached[30] <= reached[15] < reached[6] < 0.9 * reached["rand"]
    assert reached["adapow-d"] < 0.8 * reached["rand"]
    final = {name: curve[-200:].mean() for name, curve in curves.items()}
    assert final["rand"] < final[6] < final[15] < final[30]
    assert final["adapow-d"] < 0.1 * final[15]  # d came down to m in round 750
