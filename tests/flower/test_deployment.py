"""Flower's real engines: a deployment of SuperLink and SuperNodes on loopback, and the simulation engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedpick[flower]'")

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-fmnist"
sys.path.insert(0, str(EXAMPLE))
from loopback import Loopback, free_port  # noqa: E402

pytestmark = pytest.mark.slow

TRAIN_TIMEOUT, PROBE_TIMEOUT = 90.0, 60.0


def progress(output: Path) -> dict:
    return json.loads(output.read_text()) if output.exists() else {"chosen": [], "accuracy": [], "first_round": 0}


def wait_for_rounds(output: Path, count: int, process: subprocess.Popen, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while len(progress(output)["accuracy"]) < count + 1:
        assert process.poll() is None or len(progress(output)["accuracy"]) >= count + 1, "the run ended early"
        assert time.monotonic() < deadline, f"no {count} rounds after {seconds} s: {progress(output)}"
        time.sleep(1)


def children_named(name: str, parent: int) -> list[int]:
    """Process ids below `parent` whose command line contains `name`."""
    found, pending = [], [parent]
    while pending:
        listing = subprocess.run(["pgrep", "-P", str(pending.pop())], capture_output=True, text=True).stdout.split()
        for child in map(int, listing):
            pending.append(child)
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and name in command.read_bytes().replace(b"\0", b" ").decode():
                found.append(child)
    return found


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [("pow-d", "num_candidates=4"), ("fedcor", "warmup=3,interval=3,dimension=4")],
)
def test_a_federation_survives_a_kill_a_newcomer_and_a_restart_of_its_server(tmp_path, policy, parameters):
    output, state = tmp_path / "chosen.json", tmp_path / "policy"
    settings = {
        "policy": policy,
        "policy_parameters": parameters,
        "dataset": "digits",
        "num_partitions": 8,
        "budget": 3,
        "num_server_rounds": 10,
        "min_clients": 5,
        "train_timeout": TRAIN_TIMEOUT,
        "probe_timeout": PROBE_TIMEOUT,
        "state": str(state),
        "slow_seconds": 2.0,
    }
    with Loopback(tmp_path, num_partitions=8) as federation:
        for partition in range(6):
            federation.join(partition)
        run = federation.run(**settings, output=str(output))
        wait_for_rounds(output, 2, run, 600)
        federation.kill(0)
        federation.join(6)
        wait_for_rounds(output, 10, run, 1500)
        run.wait(120)
        record = progress(output)
        assert len(record["accuracy"]) == 11
        keys = json.loads((state / "roster.json").read_text())["keys"]
        assert "partition:6" in keys  # the newcomer was taken in
        assert all(1 <= len(chosen) <= 3 for chosen in record["chosen"])
        assert all("partition:0" not in chosen for chosen in record["chosen"][-2:])  # the dead one is not waited for

        # The server app dies in the middle of a second run; a third goes on from the policy's saved state.
        second = tmp_path / "second.json"
        run = federation.run(**settings, output=str(second))
        wait_for_rounds(second, 2, run, 600)
        for process in children_named("flwr-serverapp", federation.superlink.pid):
            os.kill(process, signal.SIGKILL)
        federation._end(run, signal.SIGTERM)
        run.wait(120)
        saved = json.loads((state / "session.json").read_text())["round"]
        assert saved >= 12
        third = tmp_path / "third.json"
        run = federation.run(**{**settings, "num_server_rounds": 2}, output=str(third))
        wait_for_rounds(third, 2, run, 600)
        assert progress(third)["first_round"] == saved
        run.wait(120)


def simulate(tmp_path: Path, name: str) -> list[list[str]]:
    """One run on Flower's simulation engine; its local SuperLink is ended by the id this run started."""
    home = tmp_path / "flwr"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text('[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local:"\n')
    output = tmp_path / f"{name}.json"
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    config = f'dataset="digits" num-partitions=100 num-server-rounds=4 budget=5 output="{output}"'
    nodes = "num-supernodes=100 client-resources-num-cpus=1"
    before = superlinks()
    try:
        subprocess.run(
            ["flwr", "run", str(EXAMPLE), "local", "--stream", "--federation-config", nodes, "-c", config],
            env=environment,
            check=True,
            timeout=600,
            capture_output=True,
        )
    finally:
        for process in superlinks() - before:
            os.kill(process, signal.SIGTERM)
    return progress(output)["chosen"]


def superlinks() -> set[int]:
    listing = subprocess.run(["pgrep", "-f", "flower-superlink.*--simulation"], capture_output=True, text=True)
    return set(map(int, listing.stdout.split()))


@pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep (Debian's procps) is needed to end what is started")
def test_two_simulations_with_one_seed_choose_the_same_partitions(tmp_path):
    first, second = simulate(tmp_path, "first"), simulate(tmp_path, "second")
    assert len(first) == 4 and all(len(chosen) == 5 for chosen in first)
    assert first == second
