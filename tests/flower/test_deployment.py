"""Flower's real engines: a deployment of SuperLink and SuperNodes on loopback, and the simulation engine."""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import fedpick
from fedpick.adapter.audit import check
from fedpick.adapter.members import Roster

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-fmnist"
sys.path.insert(0, str(EXAMPLE))
from loopback import Loopback, free_port  # noqa: E402

pytestmark = pytest.mark.slow

# Shorter than the 36 to 60 seconds after which a SuperLink notices by itself that a killed SuperNode is gone: what
# ends the wait for it must be the adapter's deadline. Long enough for honest clients on a busy machine of two cores.
TRAIN_TIMEOUT, PROBE_TIMEOUT = 35.0, 35.0
# fedpick looks for replies every second; the rest is for a busy machine.
ALLOWANCE = 8.0
# Seconds that a round may spend outside of all exchanges.
OVERHEAD = 15.0
# The first round of a run waits until min_clients have described themselves, however long a busy machine takes.
READY = 600.0
TRAINING_SECONDS = 4.0
KILL_IN_ROUND = 3
ROUNDS = 10


def progress(output: Path) -> dict:
    if not output.exists():
        return {"chosen": [], "accuracy": [], "rounds": [], "running": None}
    return json.loads(output.read_text())


def wait_until(condition, process: subprocess.Popen, seconds: float, what: str, every: float = 1.0):
    """Wait for a value that is not None."""
    deadline = time.monotonic() + seconds
    while (value := condition()) is None:
        if process.poll() is not None and (value := condition()) is None:
            pytest.fail(f"the run ended before: {what}")
        assert time.monotonic() < deadline, f"not after {seconds} s: {what}"
        time.sleep(every)
    return value


def wait_for_rounds(output: Path, count: int, process: subprocess.Popen, seconds: float) -> None:
    wait_until(
        lambda: True if len(progress(output)["accuracy"]) > count else None, process, seconds, f"{count} rounds in all"
    )


def in_training(output: Path, marks: Path, first: int) -> tuple[int, int] | None:
    """(round, partition) of a client that is training for the cohort of a running round, from the given one on."""
    running = progress(output)["running"]
    if running is None or running["round"] < first:
        return None
    for key in running["cohort"]:
        partition = int(key.removeprefix("partition:"))
        try:
            since = json.loads((marks / f"training-{partition}.json").read_text())["since"]
        except FileNotFoundError:
            continue
        # Younger than the choice, so no leftover of a trial; and with time left for the kill to land in it.
        if since >= running["chosen_at"] and time.time() - since < TRAINING_SECONDS / 2:
            return running["round"], partition
    return None


def assert_nobody_waited_longer_than_the_deadlines(rounds: list[dict]) -> None:
    """Of one run."""
    for place, report in enumerate(rounds):
        for step in report["steps"]:
            # The client that is asked first of all to describe itself has a quarter of the time.
            deadlines = [TRAIN_TIMEOUT] if step["kind"] == "train" else [PROBE_TIMEOUT, PROBE_TIMEOUT / 4]
            assert step["deadline"] in deadlines
            assert step["seconds"] <= step["deadline"] + ALLOWANCE, (report["round"], step)
        in_exchanges = sum(step["seconds"] for step in report["steps"])
        assert report["seconds"] - in_exchanges <= (OVERHEAD if place else READY), report
        # Most rounds ask once or never, and train once; greeting newcomers and FedCor's trials are more exchanges.
        if place and [step["kind"] for step in report["steps"]] in (["train"], ["query.fedpick", "train"]):
            assert report["seconds"] <= TRAIN_TIMEOUT + PROBE_TIMEOUT + ALLOWANCE + OVERHEAD, report


def decide(state: Path, available: list[str]) -> tuple[list[str], list[str]]:
    """(cohort, whom the policy asks first) in the next round after a saved state, when nobody answers."""
    keys = Roster.load(state).keys
    asked: list[str] = []

    def measure(probe):
        asked.extend(keys[client] for client in probe.clients)
        return np.full(len(probe.clients), np.nan)

    mask = np.array([key in available for key in keys])
    selection = fedpick.Session.load(state).ask(available=mask, budget=3, measure=measure)
    return [keys[client] for client in selection.clients], asked


def summary(rounds: list[dict]) -> str:
    lines = [
        f"round {report['round']}: {report['seconds']:.1f} s, cohort {report['cohort']}, failed {report['failed']}, "
        + ", ".join(
            f"{step['kind']} {step['answered']}/{step['asked']} {step['seconds']:.1f} s" for step in report["steps"]
        )
        for report in rounds
    ]
    return "\n".join(lines)


@pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep (Debian's procps) is needed to kill the server app")
@pytest.mark.parametrize(
    ("policy", "parameters"),
    [("pow-d", "num_candidates=4"), ("fedcor", "warmup=3,interval=3,dimension=4"), ("herd", "")],
)
def test_a_federation_survives_a_kill_a_newcomer_and_a_restart_of_its_server(tmp_path, policy, parameters):
    output, state, marks = tmp_path / "run.json", tmp_path / "policy", tmp_path / "marks"
    marks.mkdir()
    settings = {
        "policy": policy,
        "policy_parameters": parameters,
        "dataset": "synthetic",  # the quickest to load, which every message to a SuperNode does anew
        "num_partitions": 8,
        "budget": 3,
        "num_server_rounds": ROUNDS,
        "min_clients": 5,
        "wait": READY,
        "train_timeout": TRAIN_TIMEOUT,
        "probe_timeout": PROBE_TIMEOUT,
        "state": str(state),
        "audit": str(tmp_path / "audit.jsonl"),
        "marks": str(marks),
        "slow_seconds": TRAINING_SECONDS,
    }
    with Loopback(tmp_path, num_partitions=8) as federation:
        for partition in range(6):
            federation.join(partition)
        run = federation.run(**settings, output=str(output))

        # Kill a SuperNode while it trains for the cohort of the running round; another one joins.
        killed_in, victim = wait_until(
            lambda: in_training(output, marks, KILL_IN_ROUND), run, 2 * READY, "somebody trains", every=0.1
        )
        federation.kill(victim)
        federation.join(6)
        wait_for_rounds(output, ROUNDS, run, 1500)
        run.wait(120)
        record = progress(output)
        rounds, dead, newcomer = record["rounds"], f"partition:{victim}", "partition:6"
        print(f"\n{policy}: killed {dead} in round {killed_in}\n{summary(rounds)}")
        assert [report["round"] for report in rounds] == list(range(1, ROUNDS + 1))
        assert all(1 <= len(report["cohort"]) <= 3 for report in rounds)
        assert (marks / f"training-{victim}.json").exists()  # it was cut off in the middle of its training

        cut = rounds[killed_in - 1]
        assert dead in cut["cohort"] and dead in cut["failed"] and dead not in cut["completed"]
        assert cut["completed"], "the others of the cohort completed"
        last = cut["steps"][-1]
        # One deadline was spent on the dead client, in this round and in no other.
        assert TRAIN_TIMEOUT - 1 <= last["seconds"] <= TRAIN_TIMEOUT + ALLOWANCE
        assert all(dead not in report["available"] for report in rounds[killed_in:])
        assert_nobody_waited_longer_than_the_deadlines(rounds)

        keys = Roster.load(state).keys
        assert newcomer in keys
        assert all(newcomer not in report["available"] for report in rounds[:killed_in])
        assert any(newcomer in report["available"] for report in rounds[killed_in:])

        # The server app dies in the middle of a round of a second run; a third goes on from the policy's saved state.
        second = tmp_path / "second.json"
        run = federation.run(**settings, output=str(second))
        interrupted, _ = wait_until(
            lambda: in_training(second, marks, ROUNDS + 2),
            run,
            2 * READY,
            "somebody trains in the second run",
            every=0.1,
        )
        servers = federation.below_superlink("flwr-serverapp")
        assert servers
        for process in servers:
            os.kill(process, signal.SIGKILL)
        federation.end(run, signal.SIGTERM)
        run.wait(120)
        before = progress(second)["rounds"]
        assert [report["round"] for report in before] == list(range(ROUNDS + 1, interrupted))
        assert fedpick.Session.load(state).round == interrupted - 1
        saved = shutil.copytree(state, tmp_path / "saved")
        third = tmp_path / "third.json"
        run = federation.run(**{**settings, "num_server_rounds": 1}, output=str(third))
        wait_for_rounds(third, 1, run, 900)
        run.wait(120)
        after = progress(third)["rounds"]
        print(f"server app killed in round {interrupted}\n{summary(before + after)}")
        assert [report["round"] for report in after] == [interrupted]
        assert after[0]["completed"]
        cohort, asked = decide(saved, after[0]["available"])  # what the saved state makes of the round
        if policy == "pow-d":
            candidates = min(4, len(after[0]["available"]))
            assert len(asked) == candidates and set(after[0]["cohort"]) <= set(asked)  # drawn again, the same
        elif not asked:  # no sample of FedCor's is due
            assert after[0]["cohort"] == cohort
        assert_nobody_waited_longer_than_the_deadlines(before)
        assert_nobody_waited_longer_than_the_deadlines(after)
        assert Roster.load(state).keys[: len(keys)] == keys
        assert fedpick.Session.load(state).round == interrupted
    # One log for three runs. The interrupted round was chosen twice, and ended once.
    assert not check(tmp_path / "audit.jsonl").sentence
    rows = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows if row["kind"] == "outcome"] == list(range(1, interrupted + 1))
    chosen = [row["round"] for row in rows if row["kind"] == "choice"]
    assert chosen == [*range(1, interrupted + 1), interrupted]
    assert [row["next_round"] for row in rows if row["kind"] == "open"] == [1, ROUNDS + 1, interrupted]


@pytest.mark.parametrize(
    "enough", [{"budget": 5, "quorum": 0.8}, {"budget": 4, "overcommit": 1.25}], ids=["quorum", "overcommit"]
)
def test_four_of_five_answers_end_the_round_without_the_slow_node(enough, tmp_path):
    """A cohort of 5 of 8 nodes, one of which takes ten minutes: the round ends after 4 answers."""
    output, slow_seconds, rounds = tmp_path / "run.json", 600.0, 4
    clients = fedpick.Clients(num_examples=np.ones(8))
    cohort = fedpick.Session(fedpick.policies.get("uniform"), clients, 7).ask(budget=5).clients
    slow = int(cohort[2])  # in the first cohort if all describe themselves at once, in a later one otherwise
    with Loopback(tmp_path, num_partitions=8) as federation:
        for partition in range(8):
            federation.join(partition)
        run = federation.run(
            policy="uniform",
            dataset="synthetic",
            num_partitions=8,
            **enough,
            num_server_rounds=rounds,
            min_clients=8,
            wait=READY,
            probe_timeout=200.0,
            train_timeout=1000.0,
            slow_seconds=slow_seconds,
            slow_partition=slow,
            output=str(output),
        )
        wait_for_rounds(output, rounds, run, 2 * READY)
        run.wait(120)
    reports, name = progress(output)["rounds"], f"partition:{slow}"
    print(f"\nslow: {name}\n{summary(reports)}")
    assert all(len(report["cohort"]) == 5 and len(report["completed"]) >= 4 for report in reports)
    asked, *later = itertools.dropwhile(lambda report: name not in report["cohort"], reports)
    assert asked["late"] == asked["failed"] == [name]
    assert asked["steps"][-1]["seconds"] < slow_seconds and asked["steps"][-1]["answered"] == 4
    assert all(name not in report["available"] for report in later)  # it is busy


@pytest.mark.parametrize(
    ("policy", "settings", "asks"),
    [
        ("fedgs", {"policy_parameters": "similarity=updates"}, "train"),
        ("pow-d", {"policy_parameters": "num_candidates=5", "probe": "evaluate"}, "evaluate"),
    ],
)
def test_a_policy_goes_on_when_a_member_of_its_cohort_is_killed(tmp_path, policy, settings, asks):
    output, marks = tmp_path / "run.json", tmp_path / "marks"
    marks.mkdir()
    with Loopback(tmp_path, num_partitions=5) as federation:
        for partition in range(5):
            federation.join(partition)
        run = federation.run(
            policy=policy,
            **settings,
            dataset="synthetic",
            num_partitions=5,
            budget=3,
            num_server_rounds=4,
            min_clients=4,  # a round must not wait for the one that is killed
            train_timeout=60.0,
            probe_timeout=60.0,
            marks=str(marks),
            slow_seconds=TRAINING_SECONDS,
            output=str(output),
        )
        killed_in, victim = wait_until(lambda: in_training(output, marks, 2), run, READY, "somebody trains", every=0.1)
        federation.kill(victim)
        wait_for_rounds(output, 4, run, READY)
        run.wait(120)
    rounds, dead = progress(output)["rounds"], f"partition:{victim}"
    print(f"\n{policy}: killed {dead} in round {killed_in}\n{summary(rounds)}")
    assert [report["round"] for report in rounds] == [1, 2, 3, 4]
    assert asks in [step["kind"] for step in rounds[0]["steps"][:-1]]  # before the cohort trains
    assert dead in rounds[killed_in - 1]["failed"] and all(report["completed"] for report in rounds)


def test_herd_knows_clients_that_know_nothing_of_fedpick(tmp_path):
    output, app = tmp_path / "run.json", Path(__file__).parent / "plainapp"
    for name in ("client_app.py", "task.py"):
        assert "fedpick" not in (app / "plainapp" / name).read_text()
    with Loopback(tmp_path, num_partitions=4, app=app) as federation:
        for partition in range(4):
            federation.join(partition)
        run = federation.run(num_server_rounds=3, budget=2, min_clients=4, wait=READY, output=str(output))
        run.wait(2 * READY)
    log = (tmp_path / "run.log").read_text()
    assert output.exists(), log[-3000:]
    found = json.loads(output.read_text())
    rounds, known = found["rounds"], found["known"]
    print(f"\nknown {known}, losses {found['losses']}\n{summary(rounds)}")
    assert [len(report["completed"]) for report in rounds] == [2, 2, 2]
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    # The sketch is the update of the bias, with four labels; a client is known from its first update on.
    assert known[0] == 0 and known[1] == 2 and known[2] > 2 and found["sketches"][1] == 4
    # One node is asked once whether the app answers queries. After that there are only models to train.
    asked = [(step["kind"], step["asked"]) for report in rounds for step in report["steps"]]
    assert asked == [("query.fedpick", 1), *[("train", 2)] * 3]


def test_the_older_api_goes_on_when_a_member_of_the_cohort_is_killed(tmp_path):
    """An app with the structure of Flower's baselines, under `flwr run`."""
    output, marks, state = tmp_path / "run.json", tmp_path / "marks", tmp_path / "policy"
    marks.mkdir()
    with Loopback(tmp_path, num_partitions=4, app=Path(__file__).parent / "legacyapp") as federation:
        for partition in range(4):
            federation.join(partition)
        run = federation.run(
            num_server_rounds=5,
            train_timeout=TRAIN_TIMEOUT,
            seconds=TRAINING_SECONDS,
            output=str(output),
            marks=str(marks),
            state=str(state),
        )
        killed_in, victim = wait_until(lambda: in_training(output, marks, 2), run, READY, "somebody trains", every=0.1)
        federation.kill(victim)
        wait_until(lambda: len(progress(output)["rounds"]) >= 5 or None, run, 900, "5 rounds")
        run.wait(120)
    rounds, dead = progress(output)["rounds"], f"partition:{victim}"
    print(f"\nthe older API: killed {dead} in round {killed_in}\n{summary(rounds)}")
    assert [report["round"] for report in rounds] == [1, 2, 3, 4, 5]
    assert rounds[0]["cohort"] and {"evaluate", "train"} == {step["kind"] for step in rounds[0]["steps"]}
    cut = rounds[killed_in - 1]
    assert dead in cut["failed"] and cut["completed"]
    assert all(dead not in report["completed"] for report in rounds[killed_in:])
    assert "Own aggregates" in (tmp_path / "run.log").read_text()
    assert fedpick.Session.load(state).round == 5


class Authenticated(Loopback):
    """A deployment with TLS whose SuperNodes sign with keys that were registered."""

    def __enter__(self) -> Authenticated:
        flower, certificate = self.folder / "flwr", self.folder / "certificate.pem"
        flower.mkdir(parents=True, exist_ok=True)
        write_certificate(certificate, self.folder / "tls-key.pem")
        (flower / "config.toml").write_text(
            f'[superlink.loopback]\naddress = "127.0.0.1:{self.port}"\nroot-certificates = "{certificate}"\n'
        )
        self.superlink = self._start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(self.port), "--enable-supernode-auth"),
            *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(self.folder / "tls-key.pem")),
            *("--ssl-ca-certfile", str(certificate), "--disable-runtime-dependency-installation"),
        )
        self._wait_for_port()
        return self

    def make_key(self, node: str) -> str:
        """Make the key of a SuperNode, and return the public one as the SuperLink stores it."""
        private = ec.generate_private_key(ec.SECP384R1())
        write_key(self.folder / f"{node}.key", private, serialization.PrivateFormat.OpenSSH)
        public, encoding, kind = private.public_key(), serialization.Encoding, serialization.PublicFormat
        (self.folder / f"{node}.pub").write_bytes(public.public_bytes(encoding.OpenSSH, kind.OpenSSH))
        return public.public_bytes(encoding.PEM, kind.SubjectPublicKeyInfo).decode()

    def register(self, node: str, *options: str) -> int:
        """Register the key of a SuperNode, and return its node id."""
        return int(self._supernode("register", str(self.folder / f"{node}.pub"), "loopback", *options)["node-id"])

    def wait_for(self, ids: dict[str, int]) -> None:
        """Wait until exactly these SuperNodes are online: name -> node id."""

        def online() -> bool | None:
            ended = [node for node in ids if self.nodes[node].poll() is not None]
            assert not ended, (self.folder / f"node-{ended[0]}.log").read_text()[-3000:]
            nodes = self._supernode("list", "loopback")["nodes"]
            return {int(row["node-id"]) for row in nodes if row["status"] == "online"} == set(ids.values()) or None

        wait_until(online, self.superlink, READY, "the SuperNodes are online")

    def _supernode(self, *command: str) -> dict:
        command = ("flwr", "supernode", *command, "--format", "json")
        done = subprocess.run(command, env=self.environment, timeout=READY, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def join(self, node: str) -> None:
        """Start a SuperNode that claims to be clinic-a with partition 0."""
        self.nodes[node] = self._start(
            f"node-{node}",
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}"),
            *("--root-certificates", str(self.folder / "certificate.pem")),
            *("--auth-supernode-private-key", str(self.folder / f"{node}.key")),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", 'partition-id=0 num-partitions=1 claims="clinic-a"'),
        )


def write_key(file: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def write_certificate(certificate: Path, key: Path) -> None:
    """A certificate of 127.0.0.1 that is its own authority, for a day."""
    private, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA256())
    )
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    write_key(key, private, serialization.PrivateFormat.PKCS8)


def test_registered_keys_say_who_a_client_is_whatever_it_claims(tmp_path):
    """Five SuperNodes claim to be partition 0 of clinic-a. The SuperLink knows the keys of four, the names of three."""
    audit, state, names = tmp_path / "audit.jsonl", tmp_path / "policy", {node: f"clinic-{node}" for node in "abc"}
    with Authenticated(tmp_path, num_partitions=1, app=Path(__file__).parent / "claimsapp") as federation:
        keys = {node: federation.make_key(node) for node in (*names, "nameless", "stranger")}
        ids = {node: federation.register(node, "--name", name) for node, name in names.items()}
        ids["nameless"] = federation.register("nameless")
        for node in keys:
            federation.join(node)
        federation.wait_for(ids)
        assert federation.nodes.pop("stranger").wait(READY) != 0  # the SuperLink does not let it in

        def run(number: int) -> dict:
            output = tmp_path / f"run-{number}.json"
            settings = {"state": str(state), "audit": str(audit), "wait": READY, "output": str(output)}
            federation.run(**settings, num_server_rounds=2, min_clients=2).wait(2 * READY)
            assert output.exists(), (tmp_path / "run.log").read_text()[-3000:]
            return json.loads(output.read_text())

        first = run(1)
        log = (tmp_path / "run.log").read_text()
        federation.end(federation.nodes["b"], signal.SIGTERM)
        federation.nodes["b"].wait(READY)
        federation.join("b")
        federation.wait_for(ids)
        second = run(2)
    # What a ServerApp learns of a node: its id and its name belong to the registered key, also after a restart.
    for found in (first, second):
        assert {info["id"]: (info["name"], info["key"]) for info in found["nodes"]} == {
            ids[node]: (names.get(node, ""), keys[node]) for node in ids
        }
        assert len(found["rounds"]) == 2 and found["groups"] == {"name:clinic-a": "north", "name:clinic-b": "south"}
        for report in found["rounds"]:
            assert set(report["completed"]) == {"name:clinic-a", "name:clinic-b"} and not report["failed"]
    before, after = ({info["id"]: info["since"] for info in found["nodes"]} for found in (first, second))
    assert {node for node in ids if before[ids[node]] != after[ids[node]]} == {"b"}
    assert Roster.load(state).keys == ["name:clinic-a", "name:clinic-b"]

    # Of the two members one keeps the partition id that both claim. That is no proof, and no identity.
    holder, other = sorted(("a", "b"), key=ids.__getitem__)
    refused = f"its claim to be partition:0 is refused: node {ids[holder]} has that identity"
    standings = {
        (f"name:clinic-{holder}", str(ids[holder]), "member", "registered under this name"),
        (f"name:clinic-{other}", str(ids[other]), "member", f"registered under this name; {refused}"),
        ("name:clinic-c", str(ids["c"]), "excluded", "exclude= names name:clinic-c"),
        ("partition:0", str(ids["nameless"]), "refused", f"node {ids[holder]} has this identity and is online"),
    }
    assert {tuple(row.values()) for row in first["standings"]} == standings
    assert f"name:clinic-{other} claims to be partition:0, which node {ids[holder]} is: the claim is refused" in log
    assert f"Node {ids['nameless']} claims to be partition:0, but node {ids[holder]} has this identity" in log

    command = [Path(sys.executable).parent / "fedpick", "audit", audit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=READY)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    runs = [line["changes"] for line in lines if line["kind"] == "members"]
    assert [{tuple(change.values()) for change in changes} for changes in runs] == [standings, standings]
    assert [line["round"] for line in lines if line["kind"] == "outcome"] == [1, 2, 3, 4]


def test_the_tutorials_federation_trains(tmp_path):
    """The command as printed. Who is chosen also depends on which node described itself first, and on late answers."""
    page = (EXAMPLE.parents[1] / "docs" / "tutorials" / "to-flower.md").read_text()
    (command,) = re.findall(r"^python (loopback.py .*)", page, re.MULTILINE)
    folder = ["--folder", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, *command.split(), *folder], cwd=EXAMPLE, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert len(found["chosen"]) == 3 and all(1 <= len(cohort) <= 2 for cohort in found["chosen"])
    assert set().union(*found["chosen"]) <= {f"partition:{k}" for k in range(4)}
    assert found["accuracy"][-1] > found["accuracy"][0]


def simulate(tmp_path: Path, name: str) -> list[list[str]]:
    """One run on Flower's simulation engine, which starts a local SuperLink that would stay."""
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
    command = ["flwr", "run", str(EXAMPLE), "local", "--stream", "--federation-config", nodes, "-c", config]
    try:
        for _ in range(10):  # Flower gives the SuperLink 15 seconds to start, which is short for a busy machine
            done = subprocess.run(command, env=environment, timeout=READY, capture_output=True, text=True)
            log = done.stdout + done.stderr
            if "Failed to start local SuperLink within" not in log:
                break
        assert done.returncode == 0, log[-3000:]
        assert "Policy: pow-d" in log and "Round 4: " in log, log[-3000:]  # in what --stream shows
    finally:
        # Found by the folder of its log, which no other process has.
        listing = subprocess.run(["pgrep", "-f", f"flower-superlink.*{home}"], capture_output=True, text=True)
        for process in map(int, listing.stdout.split()):
            os.kill(process, signal.SIGTERM)
    return progress(output)["chosen"]


@pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep (Debian's procps) is needed to end what is started")
def test_two_simulations_with_one_seed_choose_the_same_partitions(tmp_path):
    first, second = simulate(tmp_path, "first"), simulate(tmp_path, "second")
    assert len(first) == 4 and all(len(chosen) == 5 for chosen in first)
    assert first == second
