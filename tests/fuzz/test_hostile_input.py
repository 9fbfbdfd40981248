"""Single faults that were found by attacking: secrets in messages, bombs, raw exceptions, hostile text."""

import csv
import io
import sqlite3
import sys
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

from fedpick.availability.logs import read_logs
from fedpick.cli.experiments import same_command
from fedpick.core import registry
from fedpick.core.errors import DataError, InvalidInput, StateFileError
from fedpick.core.types import as_floats
from fedpick.data.images import EMNIST_DIGITS, FMNIST
from fedpick.data.sources import Collection, File, find_files
from fedpick.experiments.encoding import array_bytes, bytes_array, mask_from
from fedpick.experiments.spec import SpecError, load_spec, parse_spec
from fedpick.experiments.store import Store, StoreError, open_store, public_name
from fedpick.experiments.verify import verify
from fedpick.report.analysis import load_results
from fedpick.report.tables import tables_of, to_csv
from tests.experiments.tiny import tiny_spec
from tests.report.report_store import make_spec, make_store

SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://ann:{SECRET}@host/db",
        f"postgresql://host/db?password={SECRET}&user=ann",
        f"postgresql://ann:{SECRET}@host:port/db",
        f"postgresql://ann:{SECRET}",
        f"postgresql://ann:{SECRET}/x@host:1/db",
    ],
)
def test_no_message_shows_a_password(url, monkeypatch):
    assert SECRET not in public_name(url)
    for words in (["--store", url], [f"--store={url}"]):
        monkeypatch.setattr(sys, "argv", ["fedpick", "run", "a.toml", "--restart", *words])
        command = same_command()
        assert SECRET not in command
        assert command.startswith("fedpick run a.toml ")
        assert "--restart" not in command


@pytest.mark.parametrize("url", [f"postgresql://ann:{SECRET}@host:port/db", f"postgresql://ann:{SECRET}"])
def test_a_malformed_url_is_refused_without_its_password(url):
    with pytest.raises(StoreError, match="is not a database URL") as refused:
        Store(url)
    assert SECRET not in str(refused.value)
    assert refused.value.__suppress_context__


def test_data_come_over_https():
    for collection in (FMNIST, EMNIST_DIGITS):
        urls = [*collection.archives, *(url for file in collection.files for url in file.urls)]
        assert urls
        assert all(url.startswith("https://") for url in urls)


def test_a_file_without_a_published_hash_is_pinned_on_first_use(tmp_path):
    given, cache = tmp_path / "given", tmp_path / "cache"
    given.mkdir()
    collection = Collection(name="toy", files=(File(name="a.txt"),), archives=("https://127.0.0.1:9/a.zip",))

    def put(text):
        with zipfile.ZipFile(given / "a.zip", "w") as archive:
            archive.writestr("a.txt", text)

    put("first")
    found = find_files(collection, directory=given, store=cache)["a.txt"]
    assert found.read_text() == "first"
    assert (cache / "a.txt.sha256").read_text().endswith("  a.txt\n")
    found.write_text("changed")
    put("changed as well")
    with pytest.raises(DataError, match=r"SHA-256 .* was expected; if you trust the new file, delete"):
        find_files(collection, directory=given, store=cache)
    put("first")
    assert find_files(collection, directory=given, store=cache)["a.txt"].read_text() == "first"


def test_too_many_seeds_are_refused():
    content = {**tiny_spec().to_dict()}
    content["run"] = {**content["run"], "seeds": 10**9}
    with pytest.raises(SpecError, match=r"from 1 to 10,000"):
        parse_spec(content)
    with pytest.raises(SpecError, match=r"1 to 10,000 seeds"):
        tiny_spec().override(seeds=10**9)


def test_an_array_that_expands_without_bound_is_refused():
    with pytest.raises(StateFileError, match="larger than"):
        mask_from(zlib.compress(bytes(10**7)), size=100)
    with pytest.raises(StateFileError, match="larger than"):
        bytes_array(zlib.compress(bytes(2**28 + 1)))
    good = array_bytes(np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(bytes_array(good), np.arange(6.0).reshape(2, 3))
    cut = zlib.decompress(good)[:-8]
    with pytest.raises(StateFileError, match="cannot be read"):
        bytes_array(zlib.compress(cut))


@pytest.mark.parametrize("value", [None, "x", [1], 10**400, 1j, object()])
def test_parameters_of_the_wrong_kind(value):
    with pytest.raises(InvalidInput):
        registry.get("afl", alpha1=value)
    with pytest.raises(InvalidInput):
        registry.get("ca-fed", minimum_loss=3.0)


def test_a_weight_that_overflows_is_refused():
    """With 1e308 the distances of FedGS became infinite, and the search took one client five times."""
    with pytest.raises(InvalidInput, match="alpha"):
        registry.get("fedgs", alpha=1e308)


def test_logs_that_are_no_logs(tmp_path):
    (tmp_path / "a.csv").write_bytes("client,time,state\né,1,2\n".encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        read_logs(tmp_path / "a.csv")
    (tmp_path / "a.json").write_text("7")
    with pytest.raises(DataError, match="at least one device"):
        read_logs(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="not a JSON file"):
        read_logs(tmp_path / "b.json")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\x3f.",  # a memo of 2^30 places: 16 GB in Python's own unpickler
        b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b"x.",  # a bytearray of 2^62 bytes
        b"\x80\x05\x8e" + (2**62).to_bytes(8, "little") + b"x.",  # likewise bytes
        b"\x80\x05\x8d" + (2**62).to_bytes(8, "little") + b"x.",  # likewise text
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04]\x94(K\x01\x90.",
    ],
)
def test_pickles_that_call_or_fill_the_memory(tmp_path, capfd, content):
    """Python prints a SystemError of its own where a bytearray of a damaged file does not fit into the memory."""
    (tmp_path / "a.pkl").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(DataError):
        read_logs(tmp_path / "a.pkl")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert capfd.readouterr().err == ""


def test_deeply_nested_toml(tmp_path):
    (tmp_path / "a.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(SpecError, match="too deeply"):
        load_spec(tmp_path / "a.toml")


@pytest.mark.parametrize("text", ["a\x1b[31m", "a\x9b2J", "a\nb", "a\u202eb"])
def test_titles_and_labels_without_control_characters(text):
    content = tiny_spec().to_dict()
    with pytest.raises(SpecError, match="control characters"):
        parse_spec({**content, "title": text})
    with pytest.raises(SpecError, match="control characters"):
        parse_spec({**content, "policies": [{"name": "uniform", "label": text}]})


def test_control_characters_of_a_foreign_store_are_not_shown(tmp_path):
    make_store(tmp_path / "a.sqlite", make_spec(("a\x1b[31m",), title="t\x1b]0;x\x07", rounds=1, seeds=1)).close()
    store = open_store(tmp_path / "a.sqlite")
    experiment = store.experiment()
    assert "\x1b" not in experiment.title
    assert "\x07" not in experiment.title
    assert "\x1b" not in store.runs(experiment.id)[0].label
    store.close()


def test_no_formula_in_csv(tmp_path):
    labels = ("=1+1", "+a", "-a", "@a", "plain")
    store = make_store(tmp_path / "a.sqlite", make_spec(labels, rounds=2, seeds=1))
    for table in tables_of(load_results(store, store.experiment())):
        rows = list(csv.reader(io.StringIO(to_csv(table))))
        assert [row[0] for row in rows[1:]] == ["'=1+1", "'+a", "'-a", "'@a", "plain"]
    store.close()


def test_a_damaged_store_is_told_in_a_sentence(tmp_path):
    path = tmp_path / "a.sqlite"
    store = make_store(path, make_spec(rounds=2, seeds=1))
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE selections SET clients = X'FFFFFF'")
        connection.exec_driver_sql("UPDATE federations SET num_clients = 1152921504606846976")
    run = store.runs(store.experiment().id)[0]
    for read in (lambda: list(store.records(run.id)), lambda: store.selection_counts(run.id)):
        with pytest.raises(StoreError, match="damaged or cannot be read"):
            read()
    with pytest.raises(StoreError, match="damaged or cannot be read"):
        store.federation(run.federation_id)
    store.close()


def test_a_federation_of_fewer_than_no_clients_is_told_in_a_sentence(tmp_path):
    store = make_store(tmp_path / "a.sqlite", make_spec(("uniform",), rounds=1, seeds=1))
    with store.writing() as connection:
        connection.exec_driver_sql("UPDATE federations SET num_clients = -1, label_histogram = NULL")
    with pytest.raises(StoreError, match="wrong number of clients"):
        store.federation(1)
    store.close()


@pytest.mark.parametrize("column", ["hash", "title", "touched_at"])
def test_an_experiment_whose_text_is_no_text_is_told_in_a_sentence(tmp_path, column):
    store = make_store(tmp_path / "a.sqlite", make_spec(("uniform",), rounds=1, seeds=1))
    with store.writing() as connection:
        connection.exec_driver_sql(f"UPDATE experiments SET {column} = x'00'")
    with pytest.raises(StoreError, match="damaged or cannot be read"):
        store.experiment("0123")
    store.close()


@pytest.mark.parametrize("value", ["'x'", "-1", "0.5", "x'00'"])
def test_a_round_without_a_number_is_told_in_a_sentence(tmp_path, value):
    store = make_store(tmp_path / "a.sqlite", make_spec(("fedcor", "ca-fed"), rounds=6, seeds=1))
    with store.writing() as connection:
        for table in ("rounds", "arrays"):
            connection.exec_driver_sql(f"UPDATE {table} SET round = {value} WHERE round = 5")
    for read in (
        lambda: store.diagnostics(2),
        lambda: store.array_names(1),
        lambda: list(store.arrays(1, "policy/embedding")),
    ):
        with pytest.raises(StoreError, match="a round has the number"):
            read()
    store.close()


def test_verify_tells_damage_in_sentences(tmp_path):
    path = tmp_path / "a.sqlite"
    make_store(path, make_spec(("uniform",), rounds=1, seeds=1)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET policy = 'a\x1b[31m'")
    store = open_store(path)
    assert "a\ufffd[31m" in verify(store).sentences[0]
    with connection:
        connection.execute("UPDATE runs SET manifest = CAST(x'FF' AS TEXT)")
    assert "its row in the table runs cannot be read" in verify(store).sentences[0]
    with connection:
        connection.execute("UPDATE experiments SET spec = CAST(x'FF' AS TEXT)")
    with pytest.raises(StoreError, match="damaged or cannot be read"):
        verify(store)
    connection.close()
    store.close()


def test_diagnostics_that_are_no_table_are_told_in_a_sentence(tmp_path):
    path = tmp_path / "a.sqlite"
    make_store(path, make_spec(("uniform",), rounds=2, seeds=1)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE rounds SET diagnostics = '1.5' WHERE round = 1")
    connection.close()
    store = open_store(path)
    for read in (store.diagnostics, store.rounds, lambda run_id: list(store.records(run_id))):
        with pytest.raises(StateFileError, match="not a table"):
            read(1)
    store.close()


def test_whole_numbers_that_numpy_does_not_have():
    with pytest.raises(InvalidInput, match="from 1 to 10,000"):
        registry.get("fedcor", dimension=10**30)
    with pytest.raises(InvalidInput, match="from 1 to 100,000"):
        registry.get("tifl", tiers=2**31)
    with pytest.raises(InvalidInput, match="from 1 to 9,223,372,036,854,775,807"):
        registry.get("tifl", credits=2**63)
    for name in ("warmup", "history", "warmup_history"):  # the size of an array
        with pytest.raises(InvalidInput, match="from 0 to 100,000"):
            registry.get("fedcor", **{name: 2**63})
    with pytest.raises(InvalidInput, match="must be an array of numbers"):
        as_floats([10**400], "What measure returns")
    assert isinstance(registry.get("unbiased", prior=10**30).prior, float)
    content = tiny_spec().to_dict()
    with pytest.raises(SpecError):
        parse_spec({**content, "run": {**content["run"], "targets": [10**400]}})


def test_an_archive_of_a_newer_version_is_told_in_a_sentence(tmp_path):
    np.savez(tmp_path / "a.npz", offsets=np.array([0, 1]), t=np.array([0]), state=np.array([2]))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[content.rindex(b"PK\x01\x02") + 6] = 99  # the version that is needed to read the member
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        read_logs(tmp_path / "a.npz")
