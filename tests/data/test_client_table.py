"""Tables of clients: what is read, what is refused, and clients with exactly these labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpick import data
from fedpick.core.errors import DataError, InvalidInput
from fedpick.data.client_table import read_clients
from fedpick.data.dealers import deal_rows

TABLE = "id,num_examples,label_a,label_b\nmercy,5,2,3\n007,4,4,0\n"


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "clients.csv"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_a_table_is_read_in_the_order_of_its_rows(write):
    table = read_clients(write(TABLE))
    assert table.ids == ("mercy", "7")  # as device logs name them
    assert table.labels == ("a", "b")
    assert table.histogram.tolist() == [[2, 3], [4, 0]] and table.num_examples.tolist() == [5, 4]


def test_sizes_or_labels_are_enough(write):
    assert read_clients(write("client,num_examples\na,3\n")).histogram is None
    assert read_clients(write("ID,label_x,label_y\na,3,1.0\n", "b.csv")).num_examples.tolist() == [4]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("id,num_examples\n", "has a header and no clients"),
        ("name,num_examples\na,3\n", "header: found no column of ids (named id, client, client_id)"),
        ("id,client,num_examples\na,b,3\n", "header: found several"),
        ("id\na\n", "header: found neither num_examples nor a label"),
        ("id,num_examples,city\na,3,Oslo\n", "header: the column 'city' is not known"),
        ("id,num_examples,num_examples\na,3,3\n", "header: the column 'num_examples' occurs twice"),
        ("id,label_a\na,3\n", "header: one label alone"),
        ("id,num_examples\na,3\nb,many\n", "line 3: num_examples must be a whole number of at least 0. Got 'many'"),
        ("id,num_examples\na,3\nb,\n", "line 3: num_examples must be a whole number of at least 0. Got nothing"),
        ("id,num_examples\na,3\nb,2.5\n", "line 3: num_examples must be a whole number"),
        ("id,num_examples\na,3\nb,nan\n", "line 3: num_examples must be a whole number"),
        ("id,label_a,label_b\na,3,1\nb,-1,4\n", "line 3: label_a must be a whole number of at least 0. Got '-1'"),
        ("id,num_examples\na,3\n\nb,1\na,2\n", "line 5: the client 'a' occurs twice, first in line 2"),
        ("id,num_examples\n1,3\n01,2\n", "line 3: the client '1' occurs twice"),
        ("id,num_examples\n,3\n", "line 2: the id of the client is missing"),
        ("id,num_examples\na,0\n", "line 2: the client 'a' has no examples"),
        ("id,num_examples,label_a,label_b\na,3,1,1\n", "line 2: num_examples is 3, but the labels of 'a' sum to 2"),
        ("id,num_examples\na,3,4\n", "line 2: expected 2 columns, as in the header. Got 3"),
        ('id,num_examples\n"a,3\n', "is not a CSV file"),
        ("id,num_examples\na,2000000000\nb,2000000000\n", "all clients together may have"),
    ],
)
def test_a_bad_table_is_one_sentence_with_the_row(write, text, sentence):
    with pytest.raises(DataError) as refusal:
        read_clients(write(text))
    assert sentence in str(refusal.value) and "clients.csv" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_and_bytes_that_are_no_text(tmp_path):
    with pytest.raises(DataError, match="There is no table"):
        read_clients(tmp_path / "nosuch.csv")
    (tmp_path / "image.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not a CSV file in UTF-8"):
        read_clients(tmp_path / "image.csv")


def test_a_changed_file_is_read_again(write):
    path = write("id,num_examples\na,3\n")
    assert len(read_clients(path)) == 1
    path.write_text("id,num_examples\na,3\nbb,4\n")
    assert len(read_clients(path)) == 2


def test_a_parquet_table_is_the_same_table(write, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"id": ["mercy", "007"], "label_a": [2, 4], "label_b": [3, 0]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "clients.parquet")
    table, text = read_clients(tmp_path / "clients.parquet"), read_clients(write(TABLE))
    assert table.ids == text.ids and table.histogram.tolist() == text.histogram.tolist()
    parquet.write_table(pyarrow.table({**columns, "label_b": [3, -1]}), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match="row 2: label_b must be a whole number"):
        read_clients(tmp_path / "bad.parquet")
    (tmp_path / "text.parquet").write_text("id,num_examples")
    with pytest.raises(DataError, match="not a Parquet file"):
        read_clients(tmp_path / "text.parquet")


def naive_rows(labels, counts, rng):
    """The definition: clients in random order take the next examples of a shuffled label, again and again."""
    rows = [[] for _ in counts]
    for label in range(counts.shape[1]):
        pool = rng.permutation(np.flatnonzero(labels == label))
        taken = 0
        for client in rng.permutation(len(counts)):
            for _ in range(counts[client, label]):
                rows[client].append(pool[taken % len(pool)])
                taken += 1
    return np.concatenate([np.array(own, np.int64) for own in rows])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=8), st.integers(0, 99))
def test_the_fast_dealer_is_the_naive_one(counts, seed):
    labels, counts = np.repeat([0, 1, 2], [2, 5, 9]), np.array(counts)
    own = deal_rows(labels, counts, np.random.default_rng(seed))
    assert np.array_equal(own, naive_rows(labels, counts, np.random.default_rng(seed)))


def test_clients_get_exactly_their_labels_and_the_test_set_their_mix(write):
    rng = np.random.default_rng(0)
    histogram = rng.integers(0, 60, size=(40, 4)) + np.array([1, 0, 0, 0])
    header = "id,label_0,label_1,label_2,label_3\n"
    path = write(header + "".join(f"c{k},{','.join(map(str, row))}\n" for k, row in enumerate(histogram)))
    digits = data.load("digits")
    federation = data.partition(digits, "table", path=str(path), seed=3, holdout=0.2)
    assert np.array_equal(federation.label_histogram[:, :4], histogram)
    assert not federation.label_histogram[:, 4:].any()
    assert len(federation.indices) > len(digits)  # the examples had to be reused
    for client in range(40):  # of a label, no client holds an example twice: it asks for fewer than there are
        assert len(np.unique(federation.rows(client))) == len(federation.rows(client))
    mix = np.bincount(federation.test_y, minlength=10)
    assert mix.sum() == len(digits.test_y)
    assert np.allclose(mix[:4] / mix.sum(), histogram.sum(axis=0) / histogram.sum(), atol=1 / mix.sum())
    again, other = (data.partition(digits, "table", path=str(path), seed=seed, holdout=0.2) for seed in (3, 4))
    assert np.array_equal(federation.indices, again.indices) and not np.array_equal(federation.indices, other.indices)


def test_without_labels_sizes_are_exact(write):
    federation = data.partition(data.load("digits"), "table", path=str(write("id,num_examples\na,2000\nb,5\n")))
    assert federation.sizes.tolist() == [2000, 5]
    assert (federation.label_histogram[0] > 0).all()


def test_a_table_that_would_fill_the_memory_is_refused(write):
    path = write("id,num_examples\na,2000000000\n")
    with pytest.raises(InvalidInput, match=r"2,000,000,000 examples of 'digits', 477 GiB, more than 8 GiB"):
        data.partition(data.load("digits"), "table", path=str(path))


def test_more_labels_than_classes_are_refused(write):
    header = "id," + ",".join(f"label_{each}" for each in range(11))
    path = write(f"{header}\na{',1' * 11}\n")
    with pytest.raises(InvalidInput, match="11 labels, and the data set 10 classes"):
        data.partition(data.load("digits"), "table", path=str(path))
    with pytest.raises(InvalidInput, match="leave it out"):
        data.partition(data.load("digits"), "table", path=str(path), num_clients=1)
