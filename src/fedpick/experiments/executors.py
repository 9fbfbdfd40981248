"""Where runs are computed: in this process, in several on this machine, or on a Ray cluster.

An executor gets the unfinished runs and computes them in order. Progress is read from the store, so it looks the same
for all executors. A worker that dies loses at most the rounds since the last checkpoint.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedpick.core.errors import MissingDependency, plain_warnings
from fedpick.core.imports import importable_directories, make_importable
from fedpick.experiments.progress import Progress, RunLine
from fedpick.experiments.run import compute
from fedpick.experiments.store import Store, StoreLocked, in_a_sentence

__all__ = ["Executor", "Inline", "Processes", "RayCluster", "StopFlag"]

_POLL_SECONDS = 0.25


@contextmanager
def _on_ctrl_c(stop: StopFlag) -> Iterator[None]:
    """Let the first Ctrl-C set the flag and the second one raise KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(*_: object) -> None:
        if stop():
            raise KeyboardInterrupt
        stop.set()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class StopFlag:
    """Asks for a stop after the current rounds. `listen` says who sets it while runs are computed: Ctrl-C."""

    def __init__(self, listen: Callable[[StopFlag], AbstractContextManager[None]] = _on_ctrl_c) -> None:
        self._event = threading.Event()
        self._listen = listen

    def __call__(self) -> bool:
        """Whether to stop."""
        return self._event.is_set()

    def set(self) -> None:
        """Ask for the stop."""
        self._event.set()

    def __enter__(self) -> StopFlag:
        self._listening = self._listen(self)
        self._listening.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.__exit__(None, None, None)


class Executor(Protocol):
    """Computes runs; returns run -> what `compute` returned, or the sentence that says why it failed."""

    def __call__(self, store: Store, runs: Sequence[RunLine], progress: Progress, stop: StopFlag) -> dict[int, str]:
        """Bring every run to its number of rounds."""
        ...


def _say_end(progress: Progress, run: RunLine, result: str) -> None:
    if result == "busy":
        return  # the runner waits for the process that computes it
    failed = result not in ("done", "stopped")
    progress.finish(run.run_id, "failed" if failed else result, result if failed else None)


@dataclass(frozen=True)
class Inline:
    """One run after the other, in this process."""

    def __call__(self, store: Store, runs: Sequence[RunLine], progress: Progress, stop: StopFlag) -> dict[int, str]:
        """See `Executor`."""
        results: dict[int, str] = {}
        for run in runs:
            if stop():
                results[run.run_id] = "stopped"
                continue

            def on_round(done: int, accuracy: float | None, run_id: int = run.run_id) -> None:
                progress.update(run_id, done, accuracy)

            try:
                result = compute(store, run.run_id, run.rounds, should_stop=stop, on_round=on_round)
            except KeyboardInterrupt:
                stop.set()
                result = "stopped"
            except StoreLocked:
                raise  # the other runs would wait as long, in vain
            except Exception as error:  # the other runs go on
                result = in_a_sentence(error)
            results[run.run_id] = result
            _say_end(progress, run, result)
        return results


_stop_event: Any = None


def _enter_worker(stop_event: Any) -> None:
    """Set up a new process: it ignores Ctrl-C, which the parent handles, and ends when the parent ends."""
    global _stop_event
    _stop_event = stop_event
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plain_warnings()

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)  # the run resumes from its last checkpoint

    threading.Thread(target=end_with_parent, daemon=True).start()


def _compute_in_process(url: str, run_id: int, rounds: int) -> str:
    if _stop_event.is_set():
        return "stopped"  # submitted before the stop
    store = Store(url)
    try:
        return compute(store, run_id, rounds, should_stop=_stop_event.is_set)
    except StoreLocked:
        raise
    except Exception as error:
        return in_a_sentence(error)
    finally:
        store.close()


@dataclass(frozen=True)
class Processes:
    """Several runs at a time, each in a process of its own (spawned: JAX does not survive a fork)."""

    count: int

    def __call__(self, store: Store, runs: Sequence[RunLine], progress: Progress, stop: StopFlag) -> dict[int, str]:
        """See `Executor`."""
        context = multiprocessing.get_context("spawn")
        stop_event = context.Event()
        results: dict[int, str] = {}
        pool = ProcessPoolExecutor(
            max_workers=min(self.count, len(runs)),
            mp_context=context,
            initializer=_enter_worker,
            initargs=(stop_event,),
        )
        try:
            with _workers_without_ctrl_c():
                futures: dict[Future[str], RunLine] = {
                    pool.submit(_compute_in_process, store.url, run.run_id, run.rounds): run for run in runs
                }

            def on_stop() -> None:
                stop_event.set()
                for future in futures:
                    future.cancel()

            _follow(store, futures, _wait_for_futures, progress, stop, on_stop, results, _future_result)
        except BaseException as error:
            for process in list(pool._processes.values()):
                process.kill()  # its run resumes from the last checkpoint
            if not isinstance(error, KeyboardInterrupt):
                raise
            stop.set()
            results = {**{run.run_id: "stopped" for run in runs}, **results}
        finally:
            pool.shutdown(cancel_futures=True)
        return results


@contextmanager
def _workers_without_ctrl_c() -> Iterator[None]:
    """Start processes that never receive Ctrl-C, not even while they import: they inherit the blocked signal."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _wait_for_futures(pending: set[Any]) -> set[Any]:
    return set(wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done)


def _future_result(future: Any) -> str:
    if future.cancelled():
        return "stopped"
    try:
        return str(future.result())
    except BrokenProcessPool:
        return (
            "A worker process ended without an error message (killed, out of memory, or started by a script that does "
            "not call fedpick under `if __name__ == '__main__':`?). Run again to go on."
        )


def _follow(
    store: Store,
    handles: dict[Any, RunLine],
    wait_for: Callable[[set[Any]], set[Any]],
    progress: Progress,
    stop: StopFlag,
    on_stop: Callable[[], None],
    results: dict[int, str],
    result_of: Callable[[Any], str],
) -> None:
    """Poll the store until all work has ended, and show progress."""
    pending = set(handles)
    shown: dict[int, int] = {}
    stopping = False
    while pending:
        finished = wait_for(pending)
        if stop() and not stopping:
            stopping = True
            on_stop()
        busy = [handles[handle].run_id for handle in pending]
        for run_id, (_, done, accuracy) in store.progress(busy).items():
            if shown.get(run_id, 0) != done:
                shown[run_id] = done
                progress.update(run_id, done, accuracy)
        for handle in finished:
            run = handles[handle]
            results[run.run_id] = result_of(handle)
            _say_end(progress, run, results[run.run_id])
        pending -= finished


def _compute_on_ray(url: str, run_id: int, rounds: int, directories: Sequence[str]) -> str:
    for directory in directories:
        make_importable(Path(directory))
    store = Store(url)
    try:
        return compute(store, run_id, rounds)
    except Exception as error:
        return in_a_sentence(error)
    finally:
        store.close()


@dataclass(frozen=True)
class RayCluster:
    """Runs as Ray tasks: here, or on every machine of a cluster. Those machines must reach the store."""

    address: str | None = None
    count: int | None = None

    def __call__(self, store: Store, runs: Sequence[RunLine], progress: Progress, stop: StopFlag) -> dict[int, str]:
        """See `Executor`."""
        try:
            import ray
        except ModuleNotFoundError as error:
            raise MissingDependency(
                "The executor 'ray' needs Ray. Install it with: pip install 'fedpick[ray]'"
            ) from error
        if self.address and store.engine.url.get_backend_name() == "sqlite":
            progress.note("Every machine of the cluster must reach the store: a SQLite file works on one machine only.")
        local: dict[str, Any] = {} if self.address else {"num_cpus": self.count, "include_dashboard": False}
        ray.init(address=self.address, log_to_driver=False, configure_logging=False, **local)
        try:
            # Ray restarts a task that died with its machine; the run then resumes.
            remote = ray.remote(num_cpus=1, max_retries=3)(_compute_on_ray)
            directories = importable_directories()
            handles = {remote.remote(store.url, run.run_id, run.rounds, directories): run for run in runs}
            results: dict[int, str] = {}

            def on_stop() -> None:
                for handle in handles:
                    ray.cancel(handle, force=False)

            def wait_for(pending: set[Any]) -> set[Any]:
                return set(ray.wait(list(pending), num_returns=1, timeout=_POLL_SECONDS)[0])

            def result_of(handle: Any) -> str:
                try:
                    return str(ray.get(handle))
                except (ray.exceptions.TaskCancelledError, KeyboardInterrupt):
                    return "stopped"
                except ray.exceptions.RayError as error:
                    # A cancelled task reports the interrupt inside its own error.
                    return "stopped" if stop() else f"Ray: {type(error).__name__}: {error}"

            _follow(store, handles, wait_for, progress, stop, on_stop, results, result_of)
            return results
        finally:
            ray.shutdown()
