"""A real Flower deployment on this machine: one SuperLink and several SuperNodes on 127.0.0.1.

    python loopback.py --nodes 6 --rounds 10 --policy pow-d --dataset digits

starts everything, runs the app, prints who was chosen, and ends what it started. The class is what the test uses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

APP = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Loopback:
    """SuperLink and SuperNodes as child processes; leaving the context ends every one of them by its own id."""

    def __init__(self, folder: Path, num_partitions: int, app: Path = APP) -> None:
        self.folder, self.num_partitions, self.app = folder, num_partitions, app
        self.port = free_port()
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.runs: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def __enter__(self) -> Loopback:
        (self.folder / "flwr").mkdir(parents=True, exist_ok=True)
        connection = f'[superlink.loopback]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (self.folder / "flwr" / "config.toml").write_text(connection)
        self.superlink = self._start(
            "superlink",
            *("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(self.port)),
            "--disable-runtime-dependency-installation",
        )
        self._wait_for_port()
        return self

    def __exit__(self, *details: object) -> None:
        helpers = self.below_superlink()  # these have a session of their own and would outlive a run that is cut short
        started = (*self.runs, *self.nodes.values(), self.superlink)
        for process in started:
            self.end(process, signal.SIGTERM)
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                self.end(process, signal.SIGKILL)
                process.wait()
        for process_id in helpers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    def below_superlink(self, name: str = "") -> list[int]:
        """Process ids of what the SuperLink started and whose command line contains `name`."""
        found, pending = [], [self.superlink.pid]
        while shutil.which("pgrep") and pending:
            children = subprocess.run(["pgrep", "-P", str(pending.pop())], capture_output=True, text=True)
            for child in map(int, children.stdout.split()):
                pending.append(child)
                with contextlib.suppress(OSError):
                    if name in Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode():
                        found.append(child)
        return found

    def _start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        # A session of its own: what the process starts in turn ends with it.
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
            )

    @staticmethod
    def end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
        """Send a signal to a process that this class started, and to what it started in turn."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)

    def _wait_for_port(self) -> None:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self.superlink.poll() is not None:
                break
            time.sleep(0.2)
        raise RuntimeError(f"The SuperLink did not start; see {self.folder / 'superlink.log'}.")

    def join(self, partition: int) -> None:
        """Start the SuperNode of one partition."""
        self.nodes[partition] = self._start(
            f"node-{partition}",
            *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", f"partition-id={partition} num-partitions={self.num_partitions}"),
        )

    def kill(self, partition: int) -> None:
        """End a SuperNode without a good-bye."""
        process = self.nodes.pop(partition)
        self.end(process, signal.SIGKILL)
        process.wait()

    def run(self, **config: object) -> subprocess.Popen[bytes]:
        """Start a run of the app; the process ends with the run."""
        run = self._start("run", "flwr", "run", str(self.app), "loopback", "--stream", "-c", _as_config(config))
        self.runs.append(run)
        return run


def _as_config(config: dict[str, object]) -> str:
    return " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--policy", default="pow-d")
    parser.add_argument("--budget", type=int, default=2)
    parser.add_argument("--dataset", default="fmnist")
    parser.add_argument("--folder", type=Path, default=Path("loopback-run"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    output = folder / "chosen.json"
    with Loopback(folder, options.nodes) as federation:
        for partition in range(options.nodes):
            federation.join(partition)
        federation.run(
            policy=options.policy,
            dataset=options.dataset,
            budget=options.budget,
            num_partitions=options.nodes,
            num_server_rounds=options.rounds,
            min_clients=options.nodes,
            output=str(output),
        ).wait()
    print(output.read_text() if output.exists() else f"The run wrote nothing; see the logs in {folder}.")


if __name__ == "__main__":
    main()
