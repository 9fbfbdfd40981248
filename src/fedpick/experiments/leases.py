"""Leases: at most one process computes a run, and every other process can see which one.

The owner renews its lease every few seconds. Another process takes the lease over when the owner has not renewed it for
`STALE_SECONDS`, or at once when the owner was a process of this machine that has ended. The old owner, if it still
lives, notices at its next write: every write of a round requires the lease, in the same transaction.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedpick.core.errors import InvalidInput
from fedpick.experiments import schema as tables
from fedpick.experiments.schema import sa

__all__ = ["STALE_SECONDS", "RunLeased", "beating", "describe", "has_ended", "holder", "new_owner", "take"]

STALE_SECONDS = 60.0
_BEAT_SECONDS = 5.0


class RunLeased(InvalidInput):
    """Another process computes this run."""


def new_owner() -> str:
    """Name an owner in this process: host, process id, machine and start of the process, and a random part."""
    pid = os.getpid()
    host = platform.node().replace(" ", "-") or "unknown"
    return f"{host} {pid} {_machine()}:{_started(pid)} {uuid.uuid4().hex}"


def describe(owner: str) -> str:
    """Name an owner for people."""
    host, pid, *_ = owner.split(" ")
    return f"process {pid} on {host}"


def has_ended(owner: str) -> bool:
    """Whether the owner's process certainly has ended. False for other machines, and where the system cannot say."""
    _, pid, process, _ = owner.split(" ")
    machine, _, started = process.partition(":")
    return bool(machine) and machine == _machine() and _started(int(pid)) != started


def _machine() -> str:
    """Identify the running system and its table of processes, which containers do not share; "" if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink().name}".replace(":", "")
    return ""


def _started(pid: int) -> str:
    """When a process of this machine started, in ticks; "" if it has ended. Process ids are used again."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    return ""


def _now(connection: sa.Connection) -> float:
    """Seconds since 1970 by one clock for all owners: the database server's, or this machine's for a file."""
    if connection.dialect.name == "postgresql":
        return float(connection.scalar(sa.select(sa.extract("epoch", sa.func.clock_timestamp()))) or 0.0)
    return time.time()


def holder(connection: sa.Connection, run_id: int) -> str | None:
    """Return the living owner of a run's lease."""
    row = connection.execute(sa.select(tables.leases).where(tables.leases.c.run_id == run_id)).one_or_none()
    if row is None or has_ended(row.owner) or _now(connection) - row.beat > STALE_SECONDS:
        return None
    return str(row.owner)


def take(connection: sa.Connection, run_id: int, owner: str) -> None:
    """Take the lease of a run; raise RunLeased if another living owner has it. Transactions that take must queue."""
    other = holder(connection, run_id)
    if other not in (None, owner):
        raise RunLeased(f"Run {run_id} is being computed by {describe(other or '')}. Let it finish, or stop it.")
    # This waits for a write of the old owner that is under way; afterwards its rows are visible here.
    connection.execute(tables.leases.delete().where(tables.leases.c.run_id == run_id))
    connection.execute(tables.leases.insert(), {"run_id": run_id, "owner": owner, "beat": _now(connection)})


_BEAT = (
    tables.leases.update()
    .where(tables.leases.c.run_id == sa.bindparam("run"), tables.leases.c.owner == sa.bindparam("me"))
    .values(beat=sa.bindparam("now"))
)


@contextmanager
def beating(engine: sa.Engine, run_id: int, owner: str) -> Iterator[None]:
    """Renew the lease every few seconds: a round, or the compilation of its program, may take minutes."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_SECONDS):
            with suppress(sa.exc.SQLAlchemyError), engine.begin() as connection:  # if it fails, the next one follows
                connection.execute(_BEAT, {"run": run_id, "me": owner, "now": _now(connection)})

    thread = threading.Thread(target=beat, name=f"lease of run {run_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
