"""PyTorch, imported only when it is needed, and the threads in which it trains."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Barrier
from typing import Any, TypeVar

from fedpick.core.errors import MissingDependency

__all__ = ["default_threads", "in_threads", "one_core", "require_torch", "seeded"]

T = TypeVar("T")


@cache
def require_torch() -> Any:
    """The torch module."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency(
            "PyTorch modules need PyTorch. Install it with: pip install 'fedpick[torch]'"
        ) from error
    return torch


def default_threads() -> int:
    """How many clients train at the same time: one per core."""
    return min(os.cpu_count() or 1, 8)


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Threads that use one core each: numbers then do not depend on how many cores there are."""
    torch = require_torch()
    ours, started = torch.get_num_threads(), Barrier(count + 1)

    def start() -> None:
        # A new thread takes over the number that was set last, in any thread, when it first asks for it. Only then does
        # a number of its own last.
        torch.get_num_threads()
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="fedpick-torch", initializer=start)
    for _ in range(count):
        pool.submit(int)
    started.wait()
    torch.set_num_threads(ours)
    return pool


def in_threads(function: Callable[[Any], T], items: Iterable[Any], count: int) -> Iterator[T]:
    """Call the function with every item, `count` at a time; yield the results in the order of the items.

    Items are taken, and results are kept, only a few ahead of the caller: updates of a whole cohort may be large.
    """
    pool, calls = _pool(count), deque[Future[T]]()
    try:
        for item in items:
            calls.append(pool.submit(function, item))
            if len(calls) > 4 * count:
                yield calls.popleft().result()
        while calls:
            yield calls.popleft().result()
    finally:
        for call in calls:
            call.cancel()


@contextmanager
def one_core() -> Iterator[None]:
    """Use one core in the calling thread.

    Otherwise OpenMP starts a helper for large sums, which then spins for a while on a core that trains clients.
    """
    torch = require_torch()
    ours = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(ours)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw PyTorch's random numbers from this seed, and leave its generators as they were."""
    torch = require_torch()
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        yield
