"""Build the wheel and try every extra alone, each in a fresh virtual environment.

The tests run in one environment that holds every extra; there, one extra can hide what another lacks. This script
installs what a user installs, `fedpick[EXTRA]` from the wheel, and runs a command that needs the extra.

    python scripts/try_wheel.py               # every extra, with the newest dependencies that pip finds
    python scripts/try_wheel.py --oldest sim  # one extra, with the oldest versions that pyproject.toml allows

pip chooses and fetches the packages. uv installs them, because it links files where pip would unpack them again for
every environment.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
UV = [sys.executable, "-m", "uv", "--quiet", "--no-config"]


class Failed(Exception):
    """An installation or a command did not do what a user expects."""


def run(*command: str | Path, folder: Path, code: int = 0, says: str = "") -> str:
    """Run a command outside the repository; return its output, or raise `Failed` if it ends or prints otherwise."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder, env=environment | {"PYTHONNOUSERSITE": "1", "COLUMNS": "200"}, capture_output=True, text=True,
    )  # fmt: skip
    output = done.stdout + done.stderr
    if done.returncode != code or says not in output or (code and "Traceback" in output):
        expected = f"exit code {code}" + (f" and {says!r}" if says else "") + (" and no traceback" if code else "")
        raise Failed(f"{' '.join(map(str, command))}\nexpected {expected}, got exit code {done.returncode}:\n{output}")
    return output


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one extra, and an empty folder to work in."""

    bin: Path
    folder: Path

    def fedpick(self, *arguments: str | Path, code: int = 0, says: str = "") -> str:
        """Run the program `fedpick`."""
        return run(self.bin / "fedpick", *arguments, folder=self.folder, code=code, says=says)

    def python(self, program: str, *, code: int = 0, says: str = "") -> str:
        """Run a Python program."""
        return run(self.bin / "python", "-c", program, folder=self.folder, code=code, says=says)

    def misses(self, extra: str, program: str) -> None:
        """Require that a program which needs another extra ends with the line that installs it."""
        self.python(
            f"from fedpick.core.errors import MissingDependency\n"
            f"try:\n    {program}\nexcept MissingDependency as error:\n    print(error)",
            says=f"pip install 'fedpick[{extra}]'",
        )


# What is tried in the environment of each extra. The path is the store that `sim` writes and `report` reads.


def try_none(environment: Environment, store: Path) -> None:
    """The README's loop; everything else names the extra to install."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    environment.python(blocks[0])
    environment.fedpick("list", "policies", code=1, says="pip install 'fedpick[cli]'")
    environment.misses("flower", "import fedpick.flower")
    environment.misses("nvflare", "import fedpick.nvflare")
    environment.misses("private", "from fedpick import private; private.scalar_products([[1.0, 2.0], [3.0, 4.0]])")
    environment.misses("sim", "from fedpick.experiments.store import Store")
    environment.misses("sim", "from fedpick import data; data.load('digits')")
    environment.misses("report", "from fedpick.report import html")


def try_cli(environment: Environment, store: Path) -> None:
    """Commands, their help and their refusals; experiments name the extra to install."""
    environment.fedpick("list", "policies", says="fedcor")
    environment.fedpick("check", "uniform", says="uniform")
    for command in ([], ["run"], ["list"]):
        environment.fedpick(*command, "--help", says="Usage")
    environment.fedpick("nosuch", code=2, says="No such command")
    environment.fedpick("list", "policies", "--nosuch", code=2, says="No such option")
    environment.fedpick("compare", code=2, says="Missing option")
    environment.fedpick("compare", "--dataset", "digits", code=1, says="pip install 'fedpick[sim]'")
    environment.fedpick("report", code=1, says="pip install 'fedpick[sim]'")


def try_sim(environment: Environment, store: Path) -> None:
    """A comparison; the report names the extra to install, and the results are kept."""
    environment.fedpick("list", "tasks", says="logistic")
    environment.fedpick(
        "compare", "--dataset", "digits", "--policies", "uniform,pow-d", "--clients", "10", "--budget", "2",
        "--rounds", "3", "--seeds", "1", "--processes", "1", "--store", store,
        says="pip install 'fedpick[report]'",
    )  # fmt: skip
    environment.fedpick("report", "--no-html", "--store", store, says="pow-d")
    environment.misses("torch", "from fedpick.sim import tasks; tasks.get('mlp', engine='torch')")
    refused = ["report", "--store", "postgresql://localhost/results"]
    environment.fedpick(*refused, code=2, says="pip install 'fedpick[postgres]'")


def try_torch(environment: Environment, store: Path) -> None:
    """A comparison with a module of the user, without JAX; a task in JAX names the extra to install."""
    (environment.folder / "mine.py").write_text(
        "from torch import nn\n\n\ndef network(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    environment.python("import importlib.util\nassert importlib.util.find_spec('jax') is None, 'the extra brings JAX'")
    environment.fedpick(
        "compare", "--dataset", "digits", "--task", "mine:network", "--policies", "uniform,pow-d", "--clients", "10",
        "--budget", "2", "--rounds", "3", "--seeds", "1", "--processes", "1", "--no-report",
        "--store", store.with_name("torch.sqlite"), says="pow-d",
    )  # fmt: skip
    environment.misses("sim", "from fedpick.sim import tasks; tasks.get('mlp')")


def try_report(environment: Environment, store: Path) -> None:
    """Tables, page and figures from a store that was written elsewhere."""
    page, figures = environment.folder / "page.html", environment.folder / "figures"
    environment.fedpick("report", "--store", store, "--output", page, "--figures", figures, says="pow-d")
    if "pow-d" not in page.read_text() or not list(figures.glob("*.png")):
        raise Failed(f"fedpick report wrote no page or no figures in {environment.folder}")
    environment.fedpick("compare", "--dataset", "digits", code=1, says="pip install 'fedpick[sim]'")


def try_dashboard(environment: Environment, store: Path) -> None:
    """The server answers with the experiments of a store, and their report."""
    environment.python(
        "import subprocess, sys, urllib.request\n"
        f"command = [sys.executable, '-m', 'fedpick', 'dashboard', '--port', '0', '--store', {str(store)!r}]\n"
        "server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)\n"
        "try:\n"
        "    link = server.stdout.readline().split()[-1]\n"
        "    for path in ('', 'api/experiments', 'report/1'):\n"
        "        print(urllib.request.urlopen(link + path, timeout=120).read().decode())\n"
        "finally:\n"
        "    server.terminate()\n"
        "    server.wait()\n",
        says="pow-d",
    )


def try_private(environment: Environment, store: Path) -> None:
    """The protocol between clients."""
    environment.python(
        "import numpy as np\nfrom fedpick.private import scalar_products\n"
        "vectors = np.array([[1.0, 2.0], [3.0, 4.0]])\n"
        "assert scalar_products(vectors, fractional_bits=0)[0, 1] == 11"
    )


def try_parquet(environment: Environment, store: Path) -> None:
    """A table of clients."""
    environment.python(
        "import pyarrow\nfrom pyarrow import parquet\nfrom fedpick.data.client_table import read_clients\n"
        "parquet.write_table(pyarrow.table({'id': ['a', 'b'], 'num_examples': [3, 4]}), 'clients.parquet')\n"
        "assert read_clients('clients.parquet').num_examples.tolist() == [3, 4]"
    )


def try_postgres(environment: Environment, store: Path) -> None:
    """The driver is found: what fails is the connection, to a port on which nothing listens."""
    environment.python(
        "from fedpick.core.errors import FedpickError\nfrom fedpick.experiments.store import Store\n"
        "try:\n    Store('postgresql://127.0.0.1:1/results')\nexcept FedpickError as error:\n    print(error)",
        says="127.0.0.1",
    )


def try_flower(environment: Environment, store: Path) -> None:
    """A strategy and a client application, without Ray: what a SuperLink and a SuperNode need."""
    environment.python(
        "import importlib.util\nimport fedpick\nfrom fedpick.flower import answer_probes, with_policy\n"
        "from flwr.clientapp import ClientApp\nfrom flwr.serverapp.strategy import FedAvg\n"
        "with_policy(FedAvg(), fedpick.policies.get('pow-d', num_candidates=4), budget=2, seed=7)\n"
        "answer_probes(ClientApp(), loss=lambda arrays, context, batch: 0.0, num_examples=lambda context: 1)\n"
        "assert importlib.util.find_spec('ray') is None, 'the light extra brings Ray'"
    )


def try_nvflare(environment: Environment, store: Path) -> None:
    """A controller in a job's configuration."""
    environment.python(
        "from pathlib import Path\nfrom fedpick.nvflare import PolicyController\n"
        "from nvflare.job_config.api import FedJob\n"
        "job = FedJob(name='job')\n"
        "job.to_server(PolicyController(policy='pow-d', policy_options={'num_candidates': 4}, budget=2))\n"
        "job.export_job('jobs')\n"
        "print(next(Path('jobs').rglob('config_fed_server.json')).read_text())",
        says='"num_candidates": 4',
    )


def try_flower_simulation(environment: Environment, store: Path) -> None:
    """Flower's simulation engine finds Ray."""
    environment.python("import ray, flwr.simulation\nfrom fedpick.flower import with_policy")


def try_ray(environment: Environment, store: Path) -> None:
    """A comparison on a local Ray cluster."""
    environment.fedpick(
        "compare", "--dataset", "digits", "--policies", "uniform", "--clients", "10", "--budget", "2", "--rounds", "2",
        "--seeds", "1", "--executor", "ray", "--processes", "1", "--no-report",
        "--store", store.with_name("ray.sqlite"), says="uniform",
    )  # fmt: skip


TRIALS: dict[str, Callable[[Environment, Path], None]] = {
    "none": try_none,
    "cli": try_cli,
    "sim": try_sim,
    "torch": try_torch,
    "report": try_report,
    "dashboard": try_dashboard,
    "private": try_private,
    "parquet": try_parquet,
    "postgres": try_postgres,
    "flower": try_flower,
    "flower-simulation": try_flower_simulation,
    "nvflare": try_nvflare,
    "ray": try_ray,
}


def build_wheel(folder: Path) -> Path:
    """Build the wheel; refuse one that holds anything but the package, or not all of it."""
    run(*PIP, "wheel", "--no-deps", "--wheel-dir", folder, ROOT, folder=folder)
    (wheel,) = folder.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    expected = {
        str(path.relative_to(source))
        for path in (source / "fedpick").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if packed != expected:
        raise Failed(f"The wheel differs from src/fedpick in: {', '.join(sorted(packed ^ expected))}")
    return wheel


def project() -> dict[str, list[str]]:
    """The requirements of every extra in pyproject.toml; those of the package itself are "none"."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"none": table["dependencies"], **table["optional-dependencies"]}


def oldest_versions(extra: str) -> list[str]:
    """The lower bounds of an extra, and of the package itself, as pinned versions."""
    known, pinned = project(), {}
    waiting = [*known["none"], *known[extra]]
    while waiting:
        requirement = waiting.pop()
        if found := re.match(r"fedpick\[(.+)\]", requirement):
            waiting += [each for name in found[1].split(",") for each in known[name]]
        elif found := re.match(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)", requirement):
            pinned[found[1]] = found[2]
        else:
            raise Failed(f"pyproject.toml: {requirement!r} has no lower bound.")
    return [f"{name}=={oldest}" for name, oldest in pinned.items()]


@dataclass(frozen=True)
class Workshop:
    """The wheel, the downloaded dependencies, and the environments made of them."""

    folder: Path
    wheel: Path
    oldest: bool
    downloading: threading.Lock

    def environment(self, extra: str) -> Environment:
        """Make a fresh environment with one extra."""
        place = self.folder / extra
        venv.create(place / "venv", symlinks=True)
        environment = Environment(place / "venv" / "bin", place / "work")
        environment.folder.mkdir()
        pinned = oldest_versions(extra) if self.oldest else []
        if extra == "torch":  # pip's newest build for Linux brings CUDA, several gigabytes: take that of the tests
            pinned.append(f"torch=={version('torch')}")
        (place / "constraints.txt").write_text("\n".join(pinned))
        wanted: list[str | Path] = ["--constraint", place / "constraints.txt"]
        wanted.append(f"fedpick[{extra}] @ {self.wheel.as_uri()}" if extra != "none" else self.wheel)
        with self.downloading:
            self.fetch(wanted)
        uv: list[str | Path] = [*UV, "--cache-dir", self.folder / "cache", "pip"]
        target: list[str | Path] = ["--python", environment.bin / "python"]
        offline: list[str | Path] = ["--no-index", "--find-links", self.folder / "wheels"]
        run(*uv, "install", *target, *offline, *wanted, folder=self.folder)
        run(*uv, "check", *target, folder=self.folder)
        return environment

    def fetch(self, wanted: list[str | Path]) -> None:
        """Let pip fetch a package and what it needs; again if the index breaks off, as a busy one does.

        All go into one folder: pip does not fetch a file again that an earlier extra needed too.
        """
        command = [*PIP, "wheel", "--wheel-dir", self.folder / "wheels", *wanted]
        for _ in range(2):
            try:
                run(*command, folder=self.folder)
                return
            except Failed as error:
                if "ConnectionError" not in str(error) and "ChunkedEncodingError" not in str(error):
                    raise
        run(*command, folder=self.folder)

    def attempt(self, extras: list[str]) -> list[str]:
        """Try extras one after the other; return those that failed."""
        failed = []
        for extra in extras:
            started = time.monotonic()
            try:
                environment = self.environment(extra)
                installed = time.monotonic()
                TRIALS[extra](environment, self.folder / "store.sqlite")
            except Failed as error:
                failed.append(extra)
                print(f"{extra}: FAILED\n{error}", flush=True)
            else:
                now = time.monotonic()
                print(
                    f"{extra}: works ({installed - started:.0f} s to install, {now - installed:.0f} s to try)",
                    flush=True,
                )
            shutil.rmtree(self.folder / extra, ignore_errors=True)
        return failed


def main() -> None:
    """Try the extras of the command line; leave with 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Build the wheel and try every extra alone.")
    parser.add_argument("extras", nargs="*", help=f"default: {', '.join(TRIALS)}")
    parser.add_argument("--oldest", action="store_true", help="with the oldest dependencies that pyproject.toml allows")
    options = parser.parse_args()
    if unknown := set(options.extras) - set(TRIALS):
        parser.error(f"There is no extra named {', '.join(sorted(unknown))}.")
    if untried := set(project()) - set(TRIALS) - {"all", "dev", "docs"}:
        parser.error(f"Nothing tries the extra {', '.join(sorted(untried))}: add it to {Path(__file__).name}.")
    extras = options.extras or list(TRIALS)
    if "torch" in extras and find_spec("torch") is None:
        extras.remove("torch")
        print("torch: not tried, because `make setup-torch` has not installed a build for CPUs", flush=True)
    # Report and dashboard are of the store that the simulator's environment writes: one after the other.
    readers = [extra for extra in ("report", "dashboard") if extra in extras]
    chains = [[extra] for extra in extras if extra not in ("sim", *readers)]
    if readers or "sim" in extras:
        chains.insert(0, ["sim", *readers])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workshop = Workshop(folder, build_wheel(folder), options.oldest, threading.Lock())
        with ThreadPoolExecutor(max_workers=2) as pool:
            failed = [extra for names in pool.map(workshop.attempt, chains) for extra in names]
    sys.exit(f"These extras do not work alone: {', '.join(failed)}." if failed else 0)


if __name__ == "__main__":
    main()
