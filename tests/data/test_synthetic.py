from __future__ import annotations

import numpy as np
import pytest

from fedpick import data
from fedpick.core.errors import InvalidInput
from fedpick.data.synthetic import LeafSynthetic, Quadratic, Synthetic


def by_client(dataset) -> data.Federation:
    return data.partition(dataset, "natural")


def test_labels_come_from_the_clients_own_models():
    dataset = Synthetic(alpha=0.5, beta=0.5, seed=3).load()
    federation = by_client(dataset)
    table = federation.clients()
    assert table.features.shape == (30, 61 * 10)
    for client in (0, 17):
        rows = federation.rows(client)
        bias, weights = np.split(table.features[client].reshape(61, 10), [1])
        scores = federation.x[rows] @ weights + bias
        assert (scores.argmax(axis=1) == federation.y[rows]).mean() > 0.99  # float32 may flip a near tie


def test_sizes_are_those_of_the_public_code():
    """int(lognormal(4, 2)) + 50, before a tenth goes to the test set."""
    dataset = Synthetic(num_clients=3000, dimension=2, num_classes=2, test_fraction=0.0, seed=1).load()
    sizes = by_client(dataset).sizes
    assert len(dataset.test_y) == 0 and sizes.min() >= 50
    logs = np.log(sizes - 50 + 0.5)
    assert np.median(logs) == pytest.approx(4, abs=0.15) and logs.std() == pytest.approx(2, abs=0.15)


def test_the_last_tenth_of_everybody_is_the_test_set():
    whole = Synthetic(test_fraction=0.0, seed=4).load()
    cut = Synthetic(test_fraction=0.1, seed=4).load()
    sizes = by_client(whole).sizes
    assert np.array_equal(by_client(cut).sizes, np.floor(0.9 * sizes + 1e-6))
    assert len(cut.test_y) + len(cut) == len(whole)
    first = int(by_client(cut).sizes[0])
    assert np.array_equal(cut.test_x[: sizes[0] - first], whole.train_x[first : sizes[0]])


def test_power_law_sizes():
    options = {"num_clients": 20_000, "dimension": 1, "num_classes": 2, "test_fraction": 0.0, "size_offset": 10}
    sizes = by_client(Synthetic(sizes="power-law", **options).load()).sizes
    assert sizes.min() >= 10 and sizes.max() <= 2000
    # Density n^-2 on [10, 2000]: P(size >= 100) = (1/100 - 1/2000) / (1/10 - 1/2000)
    assert (sizes >= 100).mean() == pytest.approx(0.0955, abs=0.01)


def test_alpha_and_beta_as_deviations_or_variances():
    options = {"num_clients": 4000, "dimension": 3, "num_classes": 2, "size_mean": 0.0, "size_spread": 0.1}
    for spread, expected in (("std", 9.0), ("variance", 3.0)):
        dataset = Synthetic(alpha=3.0, beta=3.0, spread=spread, size_offset=1, test_fraction=0.0, **options).load()
        centres = dataset.client_features.mean(axis=1)  # u_k plus the mean of 8 draws of variance 1
        assert centres.var() == pytest.approx(expected + 1 / 8, rel=0.1)
        inputs = np.array([dataset.train_x[dataset.groups == k].mean() for k in range(500)])
        assert inputs.var() == pytest.approx(expected + 1 / 3, rel=0.35)


def test_inputs_have_falling_variances():
    dataset = Synthetic(num_clients=1, sizes="power-law", size_offset=20_000, dimension=5, seed=2).load()
    assert dataset.train_x.var(axis=0) == pytest.approx(np.arange(1, 6) ** -1.2, rel=0.06)


def test_leaf_sizes_and_clusters():
    dataset = LeafSynthetic(num_clients=500, num_clusters=2, dimension=5, cluster_shares=(0.5, 0.5), seed=1).load()
    federation = by_client(dataset)
    assert federation.num_clients == 500
    assert federation.sizes.max() <= 900 and federation.sizes.min() >= 4
    # Clients of a cluster share their model up to a little noise: similarities fall into two heaps.
    features = dataset.client_features / np.linalg.norm(dataset.client_features, axis=1, keepdims=True)
    similar = features @ features.T
    assert (np.median(similar[similar > similar.mean()]) - np.median(similar[similar < similar.mean()])) > 0.2


def test_clients_beyond_the_first_block_are_made_alike():
    for dataset in (
        LeafSynthetic(num_clients=2500, dimension=3).load(),
        Synthetic(num_clients=2500, dimension=3).load(),
    ):
        assert by_client(dataset).num_clients == 2500
        last = dataset.groups == 2499
        bias, weights = np.split(dataset.client_features[2499].reshape(4, 10), [1])
        right = (dataset.train_x[last] @ weights + bias).argmax(axis=1) == dataset.train_y[last]
        assert right.mean() > (0.99 if dataset.name == "synthetic" else 0.7)  # LEAF adds noise to the scores
    assert Synthetic(num_clients=3, features=False).load().client_features is None


def test_quadratic_is_the_papers():
    dataset = Quadratic(num_clients=2000, seed=5).load()
    diagonal, vectors = dataset.train_x[:, 0], dataset.train_x[:, 1]
    assert dataset.train_x.shape == (2000, 2, 5)
    assert (diagonal == diagonal[:, :1]).all() and diagonal.min() >= 1 and diagonal.max() <= 20
    assert diagonal[:, 0].mean() == pytest.approx(10.5, rel=0.05) and vectors.mean() == pytest.approx(50, rel=0.05)
    table = by_client(dataset).clients()
    assert np.array_equal(table.num_examples, dataset.client_sizes)
    assert table.num_examples.mean() == pytest.approx(0.75, abs=0.02)  # of 3 x^2
    assert table.label_histogram is None


def test_quadratic_optimum_has_no_gradient():
    dataset = Quadratic(seed=6).load()
    w, value = data.quadratic_optimum(dataset)
    p = dataset.client_sizes / dataset.client_sizes.sum()
    diagonal, vectors = dataset.train_x.astype(float).transpose(1, 0, 2)
    assert np.abs(p @ (diagonal * w - vectors)).max() < 1e-9
    local = 0.5 * (diagonal * w * w).sum(1) - vectors @ w + 0.5 * (vectors**2 / diagonal).sum(1)  # equation 87
    assert value == pytest.approx(p @ local)
    with pytest.raises(InvalidInput, match="quadratic"):
        data.quadratic_optimum(Synthetic().load())


def test_a_set_without_labels_can_only_be_dealt_naturally():
    with pytest.raises(InvalidInput, match="use the partition 'natural'"):
        data.partition(Quadratic().load(), "iid", num_clients=3)
    with pytest.raises(InvalidInput, match="has 30 clients"):
        data.partition(Quadratic().load(), "natural", num_clients=3)


@pytest.mark.parametrize("make", [Synthetic, LeafSynthetic, Quadratic])
def test_a_seed_fixes_everything(make):
    first, again, other = (make(seed=seed).load() for seed in (1, 1, 2))
    assert first.train_x.tobytes() == again.train_x.tobytes()
    assert first.train_x.tobytes() != other.train_x.tobytes()


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (Synthetic, {"num_clients": 0}, "num_clients"),
        (Synthetic, {"num_classes": 1}, "num_classes"),
        (Synthetic, {"alpha": -1.0}, "'alpha' parameter"),
        (Synthetic, {"spread": "deviation"}, "'std' or 'variance'"),
        (Synthetic, {"sizes": "equal"}, "'lognormal' or 'power-law'"),
        (Synthetic, {"sizes": "power-law", "size_spread": 1.0}, "larger than 1"),
        (Synthetic, {"size_offset": 0}, "size_offset"),
        (Synthetic, {"test_fraction": 1.0}, "test_fraction"),
        (LeafSynthetic, {"num_clusters": 2, "cluster_shares": (1.0,)}, "2 shares"),
        (Quadratic, {"curvature": (0.0, 9.0)}, "curvature"),
        (Quadratic, {"exponent": 0.0}, "exponent"),
    ],
)
def test_impossible_options_are_refused(make, options, says):
    with pytest.raises(InvalidInput, match=says):
        make(**options)


def test_alpha_changes_no_label_of_fedprox():
    """One number added to all of a client's weights raises the scores of all classes alike."""
    none, some, much = (Synthetic(alpha=alpha, num_clients=20, seed=1).load() for alpha in (0.0, 0.5, 100.0))
    for other in (some, much):
        assert np.array_equal(none.train_x, other.train_x)
        assert np.array_equal(none.train_y, other.train_y)
        assert not np.allclose(none.client_features, other.client_features)


def test_alpha_moves_mixed_models_apart():
    def disagreement(alpha):
        """The share of common inputs on which the models of two clients differ."""
        dataset = Synthetic(alpha=alpha, num_clients=20, models="mixed", seed=1).load()
        models = dataset.client_features.reshape(20, 61, 10)
        inputs = np.random.default_rng(0).normal(size=(500, 60)).astype(np.float32)
        labels = (inputs @ models[:, 1:] + models[:, :1]).argmax(axis=2)
        owner = dataset.groups
        scores = np.einsum("nd,ndc->nc", dataset.train_x, models[owner, 1:]) + models[owner, 0]
        assert (scores.argmax(axis=1) == dataset.train_y).mean() > 0.999  # labelled by these models
        return (labels[::2] != labels[1::2]).mean()

    shares = [disagreement(alpha) for alpha in (0.0, 0.1, 1.0, 10.0)]
    assert shares[0] == 0
    assert np.all(np.diff(shares) > 0.05)
    with pytest.raises(InvalidInput, match="models"):
        Synthetic(models="fedprox")
