"""FedCor, figures 1, 2, 3, 9, 12 and 13, and FedGP, figure 1: toy federations and samples of loss changes.

    python -m benchmarks.figures.fedcor toys            # a few seconds
    python -m benchmarks.figures.fedcor normality benchmarks/specs/fedcor-fmnist.toml#{2SPC,1SPC,Dir}
    python -m benchmarks.figures.fedcor stationarity benchmarks/specs/fedcor-fmnist.toml#{2SPC,1SPC,Dir}
    python -m benchmarks.figures.fedcor stationarity benchmarks/specs/fedcor-cifar10.toml#2SPC --every 50 --rounds 500

**toys**, choice (FedCor, figure 1). Every client has one point, and two clients train a linear classifier from a model
that is poor for many. "independent" takes the two clients with the highest loss. "correlated" takes the picks of
algorithm 1 after the Gaussian process was trained on the loss changes of random pairs. "best" is the best of all pairs.
The papers give no numbers for their toy: the points are ours.

**toys**, picks (FedGP, figure 1). Thirty clients with Sigma_ij = exp(-(i - j)^2 / 25) (the minus is missing in print),
prior mean 0, equal weights, alpha = 1. Before each pick: the predicted effect of the pick and of another candidate on
all clients.

**normality** (figures 2, 12, 13): are the loss changes of random cohorts Gaussian? The federation of each spec trains
with random cohorts for the warm-up. From there, many random cohorts are tried and none is committed. Prints a table per
principal component of the loss changes and a multivariate test of the first ones; draws the histograms.

**stationarity** (figures 3, 9): does the covariance of the loss changes stay the same during training? Every --every
rounds, the covariance of trials is compared with the next one (equation 151, with the square root that it lacks in
print), and so are other matrices that could be meant (`matrices`). Two halves of the samples of one round show how much
of the difference is sampling; a half has half the cohorts, so this is a strict measure. The authors' program measures
while FedCor trains: `--policy fedcor-code-2023 --cohorts 1000 --first 20`.

The paper tries 1,000 cohorts. A client trains on the same mini-batches in every trial: only the cohort is random.
"""

from __future__ import annotations

import argparse
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from benchmarks.figures import FOLDER
from benchmarks.figures.drawing import draw_choices, draw_components, draw_picks, draw_similarities
from benchmarks.theory.fedcor import (
    covariance_similarity,
    henze_zirkler,
    normality,
    principal_components,
    sample_loss_changes,
)
from fedpick.core.arrays import FloatArray, IntArray
from fedpick.core.rng import Purpose, stream
from fedpick.core.types import Selection
from fedpick.experiments.run import build
from fedpick.experiments.spec import Spec, load_spec
from fedpick.policies import FedCor
from fedpick.policies._gp import discounted_mean, fit, select_greedy
from fedpick.sim import Simulator

STEPS, RATE = 20, 0.5
OTHERS = (3, 8, 27)
"""The candidates that are drawn beside the picks."""


# Toys


def points(seed: int, per_class: int = 15) -> tuple[FloatArray, IntArray]:
    """(N, 2) points of two classes, and (N,) their class."""
    rng = stream(seed, 0, Purpose.DATA)
    low = rng.normal((-1.0, -0.3), (0.5, 0.8), (per_class, 2))
    high = rng.normal((1.0, 0.3), (0.5, 0.8), (per_class, 2))
    return np.concatenate([low, high]), np.repeat([0, 1], per_class)


def losses(model: FloatArray, x: FloatArray, y: IntArray) -> FloatArray:
    """Logistic loss of every client under the line (w1, w2, b)."""
    return np.asarray(np.logaddexp(0.0, -(2 * y - 1) * (x @ model[:2] + model[2])))


def trained(model: FloatArray, x: FloatArray, y: IntArray, chosen: IntArray) -> FloatArray:
    """The mean of the models that the chosen clients reach by gradient descent on their own points."""
    results = []
    for client in chosen:
        own, sign, extended = model.copy(), 2 * y[client] - 1, np.append(x[client], 1.0)
        for _ in range(STEPS):
            own += RATE * sign * extended / (1 + np.exp(sign * (extended @ own)))
        results.append(own)
    return np.asarray(np.mean(results, axis=0))


def toy_choices(seed: int) -> tuple[FloatArray, IntArray, dict[str, tuple[IntArray, FloatArray, float]]]:
    """The points, their classes, and for every way to choose: the pair, its model and the global loss."""
    x, y = points(seed)
    start = np.array([-0.5, 1.5, 0.0])
    before = losses(start, x, y)
    count = len(y)

    def outcome(pair: IntArray) -> tuple[IntArray, FloatArray, float]:
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


def toy_picks(
    count: int = 30, picks: int = len(OTHERS)
) -> tuple[FloatArray, FloatArray, IntArray, IntArray, FloatArray, FloatArray]:
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


def draw_toys(options: argparse.Namespace) -> None:
    """FedCor and FedGP, figure 1."""
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


# Samples of loss changes


def draw_normality(options: argparse.Namespace) -> None:
    """Figures 2, 12 and 13."""
    drawn = {}
    for path in options.specs:
        spec = load_spec(path).override(only=["uniform"])
        run = build(spec.settings_of(spec.policies[0], options.seed))
        for _ in run.rounds(options.rounds):
            pass
        changes = sample_loss_changes(
            run.simulator.measure,
            len(run.session.clients),
            cohorts=options.cohorts,
            budget=spec.budget or len(run.session.clients),
            rng=stream(options.seed, options.rounds, Purpose.ANALYSIS),
        )
        components = principal_components(changes)
        found = [normality(values) for values in components.scores[:, : options.components].T]
        print(f"{spec.title}: {options.cohorts} cohorts of {spec.budget} after {options.rounds} rounds")
        print("| component | share of variance | W | p | skewness | excess kurtosis | distance |")
        print("|---|---|---|---|---|---|---|")
        for place, (share, measured) in enumerate(zip(components.share, found, strict=False), start=1):
            print(
                f"| {place} | {share:.1%} | {measured.shapiro:.4f} | {measured.p_value:.2g} | {measured.skewness:+.2f} "
                f"| {measured.excess_kurtosis:+.2f} | {measured.distance:.3f} |"
            )
        statistic, p_value = henze_zirkler(components.scores[:, : options.components])
        print(f"Henze-Zirkler, {len(found)} components: HZ = {statistic:.3f}, p = {p_value:.2g}\n", flush=True)
        drawn[spec.partition.name] = (components, found)
    draw_components(drawn, options.folder / "fedcor-normality.png")


def averaged_changes(
    simulator: Simulator, *, cohorts: int, budget: int, rng: np.random.Generator
) -> tuple[FloatArray, FloatArray]:
    """(N,) losses now, and (S, N) their changes by random cohorts, as `sample_loss_changes` measures them.

    Every client trains once. The model of a cohort is the mean of its clients' models, so this needs local training
    with the same mini-batches in every trial, and a server rate of 1.
    """
    import jax
    import jax.numpy as jnp

    count = len(simulator.clients)
    alone = [simulator.trial_params(Selection(clients=np.array([k]), weights=np.ones(1))) for k in range(count)]
    models = jax.tree.map(lambda *leaves: jnp.stack(leaves), *alone)
    average = jax.jit(lambda chosen: jax.tree.map(lambda leaf: leaf[chosen].mean(axis=0), models))
    before = simulator.client_losses()
    chosen = [rng.choice(count, budget, replace=False) for _ in range(cohorts)]
    return before, np.stack([simulator.client_losses(average(each)) - before for each in chosen])


def matrices(before: FloatArray, changes: FloatArray) -> dict[str, FloatArray]:
    """What a paper may call the covariance of loss changes; the first is what FedCor's text says."""
    after, own = before + changes, changes - changes.mean(axis=1, keepdims=True)
    return {
        "covariance": np.cov(changes, rowvar=False),
        "covariance, 100 cohorts": np.cov(changes[:100], rowvar=False),
        "covariance of changes minus their mean over clients": np.cov(own, rowvar=False),
        "correlations": np.asarray(np.corrcoef(changes, rowvar=False)),
        "second moments of the changes": changes.T @ changes,
        "second moments of the new losses": after.T @ after,
    }


def similarities(spec: Spec, options: argparse.Namespace) -> tuple[FloatArray, dict[str, FloatArray]]:
    """The measured rounds, and for every kind of matrix its similarity to that of the next measured round.

    "two halves" compares the covariances of the even and the odd samples of one round. "learned" is the covariance of
    FedCor's own Gaussian process, if the policy has one.
    """
    policy = spec.policies[0]
    run = build(spec.settings_of(policy, options.seed))
    rounds: list[int] = []
    found: list[dict[str, FloatArray]] = []
    halves: list[float] = []
    for done, _ in enumerate(run.rounds(options.rounds), start=1):
        if done % options.every or done < options.first:
            continue
        rng = stream(options.seed, done, Purpose.ANALYSIS)
        budget = spec.budget or len(run.session.clients)
        before, changes = averaged_changes(run.simulator, cohorts=options.cohorts, budget=budget, rng=rng)
        rounds.append(done)
        found.append(matrices(before, changes))
        halves.append(covariance_similarity(*(np.cov(changes[k::2], rowvar=False) for k in (0, 1))))
        process = run.session.policy
        if isinstance(process, FedCor):
            embedding = run.session.state.embedding
            learned = embedding.T @ embedding + process.noise**2 * np.eye(embedding.shape[1])
            found[-1]["learned by the Gaussian process"] = learned
    later = {name: np.array([covariance_similarity(a[name], b[name]) for a, b in pairwise(found)]) for name in found[0]}
    return np.array(rounds), {**later, "two halves": np.array(halves)}


def draw_stationarity(options: argparse.Namespace) -> None:
    """Figures 3 and 9."""
    drawn = {}
    for path in options.specs:
        spec = load_spec(path).override(only=[options.policy])
        rounds, found = similarities(spec, options)
        drawn[spec.partition.name] = (rounds, found["covariance"], found["two halves"])
        print(
            f"{spec.title}: {options.cohorts} cohorts of {spec.budget} every {options.every} rounds, {options.policy}"
        )
        print("| similarity | mean | least | " + " | ".join(f"from {number}" for number in rounds) + " |")
        print("|---" * (len(rounds) + 3) + "|")
        for name, values in found.items():
            cells = [f"{value:.3f}" for value in (values.mean(), values.min(), *values)]
            cells += [""] * (len(rounds) - len(values))  # the last round has no next one
            print(f"| {name} | " + " | ".join(cells) + " |")
        print(flush=True)
    draw_similarities(drawn, options.folder / "fedcor-stationarity.png")


def main(arguments: list[str] | None = None) -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the pictures")
    parser.add_argument("--seed", type=int, default=0, help="of points, federations and cohorts")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("toys", help="figure 1 of both papers")
    command.add_argument("--seeds", type=int, default=50, help="federations in the table, from --seed on")
    command.set_defaults(run=draw_toys)
    for name, run, cohorts, rounds in (
        ("normality", draw_normality, 300, 15),
        ("stationarity", draw_stationarity, 100, 100),
    ):
        command = commands.add_parser(name)
        command.add_argument("specs", nargs="+", type=Path, help="specs with a policy named `uniform`")
        command.add_argument("--cohorts", type=int, default=cohorts, help="random cohorts per measurement")
        command.add_argument("--rounds", type=int, default=rounds, help="of training")
        if name == "normality":
            command.add_argument("--components", type=int, default=4, help="in the table and the figure")
        else:
            command.add_argument("--every", type=int, default=10, help="rounds between measurements")
            command.add_argument("--first", type=int, default=0, help="round of the first measurement")
            command.add_argument(
                "--policy", default="uniform", help="name or label of the policy that trains the model"
            )
        command.set_defaults(run=run)
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
