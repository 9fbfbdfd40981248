"""The machine that the numbers were measured on, and where they go."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedpick.core.writing import write_atomically
from fedpick.sim.jax_engine.setup import require_jax

__all__ = ["FolderOption", "describe", "matrix_rate", "publish", "versions"]

FolderOption = Annotated[
    Path | None, typer.Option(help="Also write NAME.md and NAME.json to this folder, NAME being the command.")
]
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
    """Versions of the installed packages that matter, in this environment or that of another Python."""
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
    """Processor, cores, memory, versions, and the load of the machine now."""
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
    """The highest rate of a few products of square float32 matrices, in GFLOP/s."""
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


def publish(name: str, text: str, results: Mapping[str, Any], folder: Path | None) -> None:
    """Print a text; write it and the numbers to the folder, if there is one."""
    typer.echo(text)
    if folder is not None:
        write_atomically(folder / f"{name}.md", text + "\n")
        write_atomically(folder / f"{name}.json", json.dumps(results, indent=1) + "\n")


def listing(results: Mapping[str, Any]) -> str:
    """One line per number."""
    return "\n".join(
        f"{name.replace('_', ' ')}: {value:.6g}" if isinstance(value, float) else f"{name}: {value}"
        for name, value in results.items()
    )
