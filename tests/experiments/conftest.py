"""A real PostgreSQL server, from the system's package."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest

sa = pytest.importorskip("sqlalchemy")

_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def postgres_server():
    if not _BINARIES:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    pytest.importorskip("psycopg", reason="the driver is not installed (pip install 'fedpick[postgres]')")
    binaries = _BINARIES[-1].parent
    # PostgreSQL refuses to run as root.
    user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.getuid() == 0 else {}
    directory = Path(tempfile.mkdtemp(prefix="fedpick-postgres-"))
    if user:
        shutil.chown(directory, "postgres", "postgres")
    clean = {"PATH": os.environ["PATH"], "LC_ALL": "C"}
    subprocess.run(
        [binaries / "initdb", "-D", directory / "data", "-U", "fedpick", "-A", "trust", "-E", "UTF8", "--no-sync"],
        check=True, capture_output=True, env=clean, cwd=directory, **user,
    )  # fmt: skip
    port = free_port()
    command = [binaries / "postgres", "-D", directory / "data", "-h", "127.0.0.1", "-p", str(port), "-k", directory]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, "-c", "fsync=off"], stdout=log, stderr=log, env=clean, cwd=directory, **user
        )
    try:
        _wait_for(port, server, directory / "log")
        yield f"postgresql://fedpick@127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)  # "fast shutdown"
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for(port: int, server: subprocess.Popen, log: Path) -> None:
    import psycopg

    for _ in range(200):
        assert server.poll() is None, log.read_text()
        try:
            psycopg.connect(f"host=127.0.0.1 port={port} user=fedpick dbname=postgres", connect_timeout=2).close()
            return
        except psycopg.OperationalError:
            time.sleep(0.1)
    raise AssertionError(f"PostgreSQL did not start: {log.read_text()}")


@pytest.fixture
def postgres(postgres_server):
    """The URL of an empty database."""
    name = f"test_{uuid.uuid4().hex}"
    engine = sa.create_engine(
        f"{postgres_server}/postgres".replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT"
    )
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    engine.dispose()
    return f"{postgres_server}/{name}"
