"""What the numbers were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["describe", "matrix_rate", "versions"]

_PACKAGES = ("numpy", "scipy", "jax", "jaxlib", "flwr", "ray", "torch", "pfl", "fedjax")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gibibytes() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def versions(python: str | None = None) -> dict[str, str]:
    """Versions of the packages that matter, in this or another environment; those not there are left out."""
    if python is None or python == sys.executable:
        found = {}
        for name in _PACKAGES:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return found
    program = (
        "import json, sys\nfrom importlib import metadata as m\nfound = {}\n"
        "for name in sys.argv[1:]:\n    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\nprint(json.dumps(found))"
    )
    said = subprocess.run([python, "-c", program, *_PACKAGES], capture_output=True, text=True, check=True).stdout
    return dict(json.loads(said))


def describe() -> dict[str, Any]:
    """Processor, cores, memory, versions, and how busy the machine is now."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gibibytes": _memory_gibibytes(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": versions(),
        "load": round(os.getloadavg()[0], 2),
    }


def matrix_rate(size: int = 2048, repeats: int = 3) -> float:
    """The best of a few products of square float32 matrices, in GFLOP/s."""
    from fedpick.sim.jax_engine.setup import require_jax

    jax = require_jax()
    product = jax.jit(lambda a, b: a @ b)
    a = jax.device_put(np.ones((size, size), np.float32))
    jax.block_until_ready(product(a, a))
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(a, a))
        best = min(best, time.perf_counter() - start)
    return float(2 * size**3 / best / 1e9)
