from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpick import data
from fedpick.core.errors import InvalidInput, UnknownName
from fedpick.data.partition import OWN_CLIENTS
from fedpick.data.types import Dataset

DEALT = [name for name in data.partition_names() if name not in OWN_CLIENTS]


def make(labels, *, groups=None, num_classes=None, test=5) -> Dataset:
    labels = np.asarray(labels)
    return Dataset(
        name="made",
        train_x=np.arange(len(labels), dtype=np.float32)[:, None],
        train_y=labels,
        test_x=np.zeros((test, 1), np.float32),
        test_y=np.zeros(test, np.int32),
        num_classes=num_classes or int(labels.max()) + 1,
        groups=groups,
    )


def balanced(per_class=60, classes=10) -> Dataset:
    rng = np.random.default_rng(0)
    return make(rng.permutation(np.repeat(np.arange(classes), per_class)))


def check_complete(federation, dataset) -> None:
    """Every example has exactly one owner, and the table of clients agrees with that."""
    assert np.array_equal(np.sort(federation.indices), np.arange(len(dataset)))
    assert federation.offsets[0] == 0 and federation.offsets[-1] == len(dataset)
    parts = [federation.ranges(part) for part in ("train", "validation", "test")]
    assert np.array_equal(parts[0][0], federation.offsets[:-1])
    assert np.array_equal(parts[0][1], parts[1][0]) and np.array_equal(parts[1][1], parts[2][0])
    assert np.array_equal(parts[2][1], federation.offsets[1:])
    table = federation.clients()
    assert np.array_equal(table.num_examples, federation.sizes)
    assert np.array_equal(table.label_histogram.sum(axis=1), federation.sizes)
    assert np.array_equal(
        table.label_histogram.sum(axis=0), np.bincount(dataset.train_y, minlength=dataset.num_classes)
    )


@pytest.mark.parametrize("name", DEALT)
@pytest.mark.parametrize("num_clients", [24, 37])
def test_every_example_goes_to_exactly_one_client(name, num_clients):
    dataset = balanced()
    federation = data.partition(dataset, name, num_clients=num_clients, seed=3, holdout=0.2)
    assert federation.num_clients == num_clients
    check_complete(federation, dataset)
    assert federation.sizes.min() >= 1
    client = 4
    assert np.array_equal(
        federation.label_histogram[client], np.bincount(dataset.train_y[federation.rows(client)], minlength=10)
    )


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(DEALT),
    counts=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    num_clients=st.integers(1, 25),
    seed=st.integers(0, 10_000),
    alpha=st.sampled_from([0.05, 0.5, 100.0]),
    holdout=st.sampled_from([0.0, 0.2, 0.99]),
)
def test_any_labels_are_dealt_completely_or_refused(name, counts, num_clients, seed, alpha, holdout):
    dataset = make(np.repeat(np.arange(len(counts)), counts))
    options = {"alpha": alpha} if name.startswith("dirichlet") else {}
    if name == "dirichlet-mixture":
        options = {"alphas": [alpha, 1.0]}
    try:
        federation = data.partition(dataset, name, num_clients=num_clients, seed=seed, holdout=holdout, **options)
    except InvalidInput as refusal:
        assert "Got" in str(refusal) or "use" in str(refusal).lower()
        return
    check_complete(federation, dataset)
    assert federation.sizes.min() >= 1
    assert (federation.train_sizes >= 1).all()
    if name == "two-labels":
        assert ((federation.label_histogram > 0).sum(axis=1) == 2).all()


@pytest.mark.parametrize("name", DEALT)
def test_a_seed_fixes_the_deal_and_another_changes_it(name):
    dataset = balanced()
    first, again, other = (data.partition(dataset, name, num_clients=24, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(first.indices, again.indices) and np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.indices, other.indices)


def test_iid_sizes_differ_by_at_most_one():
    sizes = data.partition(balanced(), "iid", num_clients=7).sizes
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(("name", "shards"), [("1spc", 1), ("2spc", 2)])
def test_shards_hold_few_labels_and_are_equal(name, shards):
    federation = data.partition(balanced(), name, num_clients=20)
    assert (federation.sizes == 30).all()
    labels = (federation.label_histogram > 0).sum(axis=1)
    assert labels.max() <= shards
    same = data.partition(balanced(), "shards", num_clients=20, shards_per_client=shards)
    assert np.array_equal(same.indices, federation.indices)


def test_two_labels_are_balanced_and_mixed():
    federation = data.partition(balanced(), "two-labels", num_clients=100)
    assert (federation.sizes == 6).all()
    assert ((federation.label_histogram > 0).sum(axis=1) == 2).all()
    pairs = {tuple(np.flatnonzero(row)) for row in federation.label_histogram}
    assert len(pairs) > 20  # of the 45 there are: not a fixed pairing of labels


def test_dirichlet_class_balances():
    dataset = balanced(per_class=600)
    loose = data.partition(dataset, "dirichlet-class", num_clients=20, alpha=0.3, balance=False, min_examples=0)
    tight = data.partition(dataset, "dirichlet-class", num_clients=20, alpha=0.3, balance=True)
    assert tight.sizes.std() < loose.sizes.std()
    assert tight.sizes.min() >= 10


def test_dirichlet_class_with_a_large_alpha_is_even():
    histogram = data.partition(balanced(), "dirichlet-class", num_clients=10, alpha=1e6, balance=False).label_histogram
    assert np.abs(histogram - 6).max() <= 1


def test_dirichlet_lognormal_has_its_sizes():
    """The logarithms of the sizes are normal with the deviation asked for, whatever the labels are."""
    dataset = balanced(per_class=10_000)
    federation = data.partition(dataset, "dirichlet-lognormal", num_clients=400, alpha=1.75, seed=1)
    logs = np.log(federation.sizes)
    assert abs(logs.std() - 1.0) < 0.12
    flat = data.partition(dataset, "dirichlet-lognormal", num_clients=400, sigma=0.0, seed=1)
    assert (flat.sizes == 250).all()
    share = flat.label_histogram / flat.sizes[:, None]
    # Dir(1.75 p): variance of a share is p (1 - p) / (1.75 + 1) = 0.0327
    assert share.var() == pytest.approx(0.1 * 0.9 / 2.75, rel=0.15)


def test_dirichlet_qp_keeps_the_drawn_skew():
    dataset = balanced(per_class=6000)
    federation = data.partition(dataset, "dirichlet-qp", num_clients=100, alpha=0.2, seed=2)
    top = federation.label_histogram.max(axis=1) / federation.sizes
    assert np.median(top) > 0.8  # Dir(0.2 p) puts nearly everything on one or two labels
    assert federation.sizes.max() < 0.1 * len(dataset)


def test_natural_keeps_the_owners():
    groups = np.array([7, 3, 7, 3, 9, 9, 9])
    dataset = make([0, 1, 0, 1, 2, 2, 2], groups=groups)
    federation = data.partition(dataset, "natural")
    assert federation.sizes.tolist() == [2, 2, 3]
    for client, owner in enumerate((3, 7, 9)):
        assert set(groups[federation.rows(client)]) == {owner}


def test_holdout_is_the_last_fifth_of_a_shuffled_share():
    dataset = make(np.repeat(np.arange(10), 6000))
    federation = data.partition(dataset, "2spc", num_clients=100, holdout=0.2)
    assert (federation.train_sizes == 480).all() and (federation.validation_sizes == 120).all()
    assert np.array_equal(*federation.ranges("test"))  # nobody has local tests
    hold_out = dataset.train_y[federation.rows(0, "validation")]
    both = dataset.train_y[federation.rows(0)]
    assert set(hold_out) == set(both)  # shuffled: a hold-out of a sorted share would have one label
    assert len(federation.test_y) == 5


def test_three_way_split_and_test_set_from_local_tests():
    dataset = make(np.repeat(np.arange(4), 100), test=0)
    federation = data.partition(dataset, "iid", num_clients=4, split=(0.8, 0.05, 0.15))
    assert federation.train_sizes.tolist() == [80] * 4
    assert federation.validation_sizes.tolist() == [5] * 4
    assert [len(federation.rows(k, "test")) for k in range(4)] == [15] * 4
    local = np.concatenate([federation.rows(k, "test") for k in range(4)])
    assert np.array_equal(federation.test_x, dataset.train_x[local])
    assert np.array_equal(federation.test_y, dataset.train_y[local])


def test_packed_is_the_same_federation_in_client_order():
    dataset = balanced()
    federation = data.partition(dataset, "dirichlet-class", num_clients=9)
    packed = federation.packed()
    for client in range(9):
        assert np.array_equal(packed.x[packed.rows(client)], federation.x[federation.rows(client)])
    assert np.array_equal(packed.label_histogram, federation.label_histogram)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("iid", {"num_clients": 601}, "use fewer clients"),
        ("iid", {}, "needs num_clients"),
        ("iid", {"num_clients": 0}, "at least 1"),
        ("2spc", {"num_clients": 400}, "need 800 shards"),
        ("shards", {"num_clients": 10, "shards_per_client": 0}, "at least 1"),
        ("2spc", {"num_clients": 10, "shards_per_client": 3}, "no option 'shards_per_client'"),
        ("iid", {"num_clients": 10, "alpha": 1.0}, "It has none"),
        ("dirichlet-class", {"num_clients": 10, "alpha": 0.0}, "larger than 0"),
        ("dirichlet-class", {"num_clients": 100, "min_examples": 10}, "need 1000 examples"),
        ("dirichlet-class", {"num_clients": 60, "alpha": 0.001, "balance": False, "min_examples": 9}, "in 100 deals"),
        ("dirichlet-qp", {"num_clients": 10, "alpha": float("nan")}, "larger than 0"),
        ("dirichlet-qp", {"num_clients": 9}, "at least as many clients as labels"),
        ("dirichlet-lognormal", {"num_clients": 10, "alpha": -1}, "larger than 0"),
        ("dirichlet-lognormal", {"num_clients": 10, "sigma": -1}, "sigma"),
        ("two-labels", {"num_clients": 4}, "at least 5 clients"),
        ("natural", {}, "does not know the owners"),
        ("iid", {"num_clients": 10, "holdout": 1.0}, "less than 1"),
        ("iid", {"num_clients": 10, "split": (0.5, 0.5, 0.5)}, "sum to 1"),
        ("iid", {"num_clients": 10, "holdout": 0.2, "split": (0.8, 0.1, 0.1)}, "not both"),
    ],
)
def test_impossible_settings_are_refused(name, options, says):
    with pytest.raises(InvalidInput, match=says):
        data.partition(balanced(), name, **options)


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(UnknownName, match="Did you mean 'dirichlet-qp'"):
        data.partition(balanced(), "dirichlet-pq", num_clients=10)


def test_two_labels_refuses_a_set_that_one_label_dominates():
    dataset = make([0] * 90 + [1] * 10)
    with pytest.raises(InvalidInput, match="only 10 examples"):
        data.partition(dataset, "two-labels", num_clients=11)
    check_complete(data.partition(dataset, "two-labels", num_clients=10), dataset)


@pytest.mark.parametrize("name", data.partition_names())
def test_partitions_describe_themselves(name):
    assert len(data.describe_partition(name)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DEALT, "natural"])
def test_a_million_clients_with_ten_million_examples(name):
    """Time and memory stay near the size of the data: nothing is done client by client."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = np.random.default_rng(1)
    labels = rng.integers(10, size=10_000_000).astype(np.int32)
    dataset = Dataset(
        name="large",
        train_x=np.zeros((len(labels), 1), np.uint8),
        train_y=labels,
        test_x=np.zeros((0, 1), np.uint8),
        test_y=np.zeros(0, np.int32),
        num_classes=10,
        groups=(np.arange(len(labels)) % 1_000_000).astype(np.int32),
    )
    options = {"min_examples": 0} if name == "dirichlet-class" else {}
    federation = data.partition(dataset, name, num_clients=1_000_000, holdout=0.2, **options)
    assert len(federation.clients()) == 1_000_000
    assert federation.offsets[-1] == len(labels)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 1_200_000  # kilobytes; labels, owners, indices and (N, 10) tables, with room for sorting


@pytest.mark.parametrize("assignment", ["blocks", "round-robin"])
def test_clusters_are_alike_within_different_between_and_those_of_availability(assignment):
    from fedpick import availability

    federation = data.partition(
        balanced(per_class=6000), "clustered", num_clients=30, seed=1, num_clusters=5, alpha=0.3, assignment=assignment
    )
    process = availability.get("clustered", num_clusters=5, assignment=assignment)
    cluster = process.start(federation.clients(), 0).cluster
    shares = federation.label_histogram / federation.sizes[:, None]
    centre = np.stack([shares[cluster == number].mean(axis=0) for number in range(5)])

    def distance(first, second):
        return 0.5 * np.abs(first - second).sum(axis=-1)

    within = distance(shares, centre[cluster]).max()
    between = min(distance(centre[i], centre[j]) for i in range(5) for j in range(i))
    assert within < 0.08  # sampling error of 2,000 examples with ten labels: about 0.05 for the worst of 30 clients
    assert between > 0.3
    for number in range(5):
        sizes = federation.sizes[cluster == number]
        assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_clusters": 0}, "whole number of at least 1"),
        ({"num_clusters": 21}, "num_clusters must be between"),
        ({"assignment": "random"}, "'blocks' or 'round-robin'"),
        ({"alpha": 0.0}, "larger than 0"),
    ],
)
def test_clusters_that_cannot_be_are_refused(options, says):
    with pytest.raises(InvalidInput, match=says):
        data.partition(balanced(), "clustered", num_clients=20, **options)


def test_a_mixture_has_clients_with_few_labels_and_clients_with_all():
    federation = data.partition(balanced(), "dirichlet-mixture", num_clients=10, alphas=[0.001, 100.0], seed=3)
    labels = (federation.label_histogram > 0).sum(axis=1)
    assert labels[:5].max() <= 3
    assert labels[5:].min() >= 8
    assert federation.sizes[:5].sum() == federation.sizes[5:].sum()


def test_partitions_with_groups_fill_the_table():
    mixture = data.partition(balanced(), "dirichlet-mixture", num_clients=7, alphas=[0.1, 1.0, 100.0])
    assert mixture.clients().group.tolist() == [0, 0, 0, 1, 1, 2, 2]
    clustered = data.partition(balanced(), "clustered", num_clients=7, num_clusters=3, assignment="round-robin")
    assert clustered.clients().group.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert data.partition(balanced(), "iid", num_clients=7).clients().group is None


def test_a_mixture_needs_a_client_per_alpha():
    with pytest.raises(InvalidInput, match="at least one client per alpha"):
        data.partition(balanced(), "dirichlet-mixture", num_clients=4)
    with pytest.raises(InvalidInput, match="larger than 0"):
        data.partition(balanced(), "dirichlet-mixture", num_clients=4, alphas=[0.1, -1.0])
