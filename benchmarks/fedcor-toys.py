"""FedCor, figure 1, and FedGP, figure 1: why correlations matter, and how algorithm 1 picks.

    python benchmarks/fedcor-toys.py            # a few seconds; writes docs/figures/fedcor-toy-*.png

**Choice.** Every client has one point; two clients are to train a linear classifier from a model that is poor for many.
"independent" takes the two with the highest loss, "correlated" takes the picks of algorithm 1 after the Gaussian
process was learned from the loss changes of random pairs, "best" is the best of all pairs, found by trying. The
papers give no numbers for their toy, so the points are ours.

**Picks.** Thirty clients with Sigma_ij = exp(-(i - j)^2 / 25) (the minus is missing in print), prior mean 0, equal
weights, alpha = 1. Before each pick: what the pick and another candidate are predicted to do to everybody.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmarks.paper_figures import draw_choices, draw_picks
from fedpick.core.rng import Purpose, stream
from fedpick.policies._gp import discounted_mean, fit, select_greedy

FOLDER = Path(__file__).parents[1] / "docs/figures"
STEPS, RATE = 20, 0.5
OTHERS = (3, 8, 27)
"""The candidates that the picks are drawn beside."""


def points(seed: int, per_class: int = 15) -> tuple[np.ndarray, np.ndarray]:
    """(N, 2) points of two classes, and (N,) their class."""
    rng = stream(seed, 0, Purpose.DATA)
    low = rng.normal((-1.0, -0.3), (0.5, 0.8), (per_class, 2))
    high = rng.normal((1.0, 0.3), (0.5, 0.8), (per_class, 2))
    return np.concatenate([low, high]), np.repeat([0, 1], per_class)


def losses(model: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Logistic loss of every client under the line (w1, w2, b)."""
    return np.logaddexp(0.0, -(2 * y - 1) * (x @ model[:2] + model[2]))


def trained(model: np.ndarray, x: np.ndarray, y: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The mean of the models that the chosen clients get by gradient descent on their own point."""
    results = []
    for client in chosen:
        own, sign, extended = model.copy(), 2 * y[client] - 1, np.append(x[client], 1.0)
        for _ in range(STEPS):
            own += RATE * sign * extended / (1 + np.exp(sign * (extended @ own)))
        results.append(own)
    return np.mean(results, axis=0)


def toy_choices(seed: int) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[np.ndarray, np.ndarray, float]]]:
    """The points, their classes, and for every way to choose: the pair, its model and the global loss."""
    x, y = points(seed)
    start = np.array([-0.5, 1.5, 0.0])
    before = losses(start, x, y)
    count = len(y)

    def outcome(pair: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        model = trained(start, x, y, pair)
        return pair, model, float(losses(model, x, y).mean())

    rng = stream(seed, 0, Purpose.SELECT)
    pairs = [rng.choice(count, 2, replace=False) for _ in range(100)]
    changes = np.stack([losses(trained(start, x, y, pair), x, y) - before for pair in pairs])
    weights = np.ones(len(pairs))
    beginning = rng.normal(0, 1 / np.sqrt(15), (15, count))
    mean = discounted_mean(changes, weights)
    learned = fit(beginning, changes, weights, noise=0.01, iterations=1000, learning_rate=0.01, mean=mean)
    picks, _ = select_greedy(learned.embedding, np.full(count, 1 / count), np.ones(count), 2)
    best = min((outcome(np.array(pair)) for pair in combinations(range(count), 2)), key=lambda found: found[2])
    return (
        x,
        y,
        {
            "independent": outcome(np.argsort(before)[-2:]),
            "correlated": outcome(picks),
            "best": best,
        },
    )


def toy_picks(count: int = 30, picks: int = len(OTHERS)) -> tuple[np.ndarray, ...]:
    """The arrays that `draw_picks` draws; the picks themselves are those of `select_greedy`."""
    clients = np.arange(count)
    covariance = np.exp(-((clients[:, None] - clients[None, :]) ** 2) / 25)
    values, vectors = np.linalg.eigh(covariance)
    embedding = (vectors * np.sqrt(np.maximum(values, 0.0))).T
    chosen, _ = select_greedy(embedding, np.full(count, 1 / count), np.ones(count), picks)
    means, spreads = np.empty((picks + 1, 2, count)), np.empty((picks + 1, 2, count))
    others, predictions, expected = np.empty(picks, dtype=np.int64), np.empty((picks, 2)), np.empty((picks, 2))
    mean = np.zeros(count)
    for step in range(picks + 1):
        spread = np.sqrt(np.maximum(np.diagonal(covariance), 0.0))
        spreads[step] = mean, spread
        if step == picks:
            means[step] = mean
            break
        others[step] = OTHERS[step]
        for place, client in enumerate((chosen[step], others[step])):
            predictions[step, place] = mean[client] - spread[client]
            means[step, place] = mean - covariance[client] / spread[client]
            expected[step, place] = means[step, place].mean()
        mean = means[step, 0]
        picked = covariance[chosen[step]] / spread[chosen[step]]
        covariance = covariance - np.outer(picked, picked)
    return means, spreads, chosen, others, predictions, expected


def main(arguments: list[str] | None = None) -> None:
    """Choose, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the points")
    parser.add_argument("--seeds", type=int, default=50, help="federations in the table, from --seed on")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    found = []
    for seed in range(options.seed, options.seed + options.seeds):
        x, y, choices = toy_choices(seed)
        found.append([loss for _, _, loss in choices.values()])
        if seed == options.seed:
            draw_choices(x, y, choices, options.folder / "fedcor-toy-choice.png")
    table = np.array(found)
    print(f"| choice | global loss, seed {options.seed} | mean of {len(table)} seeds | better of the two in |")
    print("|---|---|---|---|")
    for column, name in enumerate(choices):
        wins = int((table[:, column] <= table[:, :2].min(axis=1)).sum())
        print(f"| {name} | {table[0, column]:.3f} | {table[:, column].mean():.3f} | {wins if column < 2 else ''} |")
    arrays = toy_picks()
    print("picks:", arrays[2].tolist(), "mean loss change after each:", np.round(arrays[5][:, 0], 3).tolist())
    draw_picks(*arrays, options.folder / "fedcor-toy-picks.png")


if __name__ == "__main__":
    main()
