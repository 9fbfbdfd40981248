"""Ctrl-C on the command line: the first one ends after the current round, the second one at once.

Python handles signals only between two instructions of the main thread, which may spend minutes in a compiled program.
The second Ctrl-C is therefore handled by a thread of its own, which reads the signals from a socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["KILLED", "finishing", "watching"]

KILLED = 130
"""The exit code of a program that ended by Ctrl-C, as shells have it."""

_finish: Callable[[], None] | None = None
_interrupts = 0


@contextmanager
def finishing(stop: Any) -> Iterator[None]:
    """While rounds are computed, let the first Ctrl-C call `stop.set()` instead of raising KeyboardInterrupt."""
    global _finish
    _finish = stop.set
    try:
        yield
    finally:
        _finish = None


@contextmanager
def watching() -> Iterator[None]:
    """Handle Ctrl-C as described above. A program that was started to ignore it keeps ignoring it."""
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.signal(signal.SIGINT, _on_signal)
    previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="Ctrl-C", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        # Python itself may take a while to end: a second Ctrl-C then ends it without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL if _interrupts else previous)
        writer.close()  # ends the thread


def _on_signal(*_: object) -> None:
    if _finish is None:
        raise KeyboardInterrupt
    _finish()


def _watch(reader: socket.socket) -> None:
    global _interrupts
    with reader:
        while received := reader.recv(64):
            _interrupts += received.count(signal.SIGINT)
            if _interrupts > 1:
                _leave()
            elif _finish is not None and _interrupts:
                _say("Stopping after the current rounds. Ctrl-C again leaves at once.\n")


def _leave() -> None:
    """End the worker processes and this one, whatever the main thread is doing. The runs resume from a checkpoint."""
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()
    if os.isatty(2):
        _say("\x1b[?25h\n")  # progress bars hide the cursor
    os._exit(KILLED)


def _say(text: str) -> None:
    os.write(2, text.encode())  # not sys.stderr: the main thread may hold its lock
