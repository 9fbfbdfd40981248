"""JAX, imported only when it is needed, with a compilation cache that outlives the process."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from fedpick.core.errors import MissingDependency
from fedpick.data.sources import cache_directory

__all__ = ["default_shards", "on_cpu", "require_jax"]


@cache
def require_jax() -> Any:
    """The jax module, set up once per process."""
    try:
        import jax
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "This task trains with JAX. Install it with: pip install 'fedpick[sim]'. With PyTorch instead, choose "
            'engine = "torch" for a task of fedpick.'
        ) from error
    # A user who set a cache of their own, or switched it off, keeps that choice.
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        directory = cache_directory() / "compiled"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError:
            return jax  # A read-only home is no reason not to run.
        settings = {
            "jax_compilation_cache_dir": str(directory),
            "jax_persistent_cache_min_compile_time_secs": 0.1,
            "jax_persistent_cache_min_entry_size_bytes": 0,
        }
        for name, value in settings.items():
            # Not typed by JAX.
            jax.config.update(name, value)  # type: ignore[no-untyped-call]
    return jax


def on_cpu() -> bool:
    """Whether JAX computes on the CPU here: convolutions and batching are laid out differently there."""
    return bool(require_jax().default_backend() == "cpu")


def default_shards() -> int:
    """Into how many pieces a cohort is cut: one per core on a CPU, else one.

    Plain products side by side in threads are twice as fast there as a batched one, which XLA runs on about one core.
    """
    return min(os.cpu_count() or 1, 8) if on_cpu() else 1
