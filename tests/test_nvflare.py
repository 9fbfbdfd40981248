"""The NVFlare adapter: the conformance kit with a job in memory, and real jobs in NVFlare's simulator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("nvflare", reason="NVFlare is not installed: pip install 'fedpick[nvflare]'")

from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.job_config.api import FedJob

import fedpick
from fedpick.adapter.audit import check
from fedpick.adapter.members import Roster
from fedpick.core import registry
from fedpick.core.errors import InvalidInput, MissingSignal, TrainingFailed, UnknownName
from fedpick.nvflare import PolicyController
from fedpick.testing import AdapterCase, AdapterRun, SmallClient, check_adapter

EXAMPLE = Path(__file__).parents[1] / "examples" / "nvflare-numpy"


class LocalJob(PolicyController):
    """A controller whose tasks are calls of functions; the rest is NVFlare's and fedpick's."""

    def __init__(self, clients, model, *, differences=False, **arguments):
        super().__init__(**arguments)
        self.clients = {client.name: client for client in clients}
        self.initial, self.differences, self.silent, self.sent, self.seconds = model, differences, set(), [], {}
        connected = [SimpleNamespace(name=client.name, token=f"token of {client.name}") for client in clients]
        self.engine = SimpleNamespace(get_clients=lambda: connected)
        self.abort_signal = SimpleNamespace(triggered=False)
        self.reports = []
        self._settings.progress = lambda report: self.reports.append(report) if report.over else None

    def load_model(self):
        return FLModel(params_type=ParamsType.FULL, params=self.initial)

    def save_model(self, model):
        assert model.params_type == ParamsType.FULL

    def send_model_and_wait(self, task_name="train", data=None, targets=None, min_responses=None, timeout=0):
        assert isinstance(timeout, int) and timeout >= 0
        self.sent.append((task_name, list(targets), min_responses, timeout))
        results = []
        for name in targets:
            if name in self.silent or len(results) >= min_responses:
                continue
            self._answered[name] = self.seconds.get(name, 0.0)
            client = self.clients[name]
            if task_name == "validate":
                results.append(FLModel(metrics={"loss": client.loss(data.params)}))
            else:
                try:
                    new, metrics = client.train(data.params)
                except RuntimeError:
                    continue
                if self.differences:
                    new = {key: new[key] - data.params[key] for key in new if new[key].shape == data.params[key].shape}
                kind = ParamsType.DIFF if self.differences else ParamsType.FULL
                results.append(FLModel(params_type=kind, params=new, metrics=metrics))
            results[-1].meta["client_name"] = name
        return results


def run(case: AdapterCase, *, differences: bool = False) -> AdapterRun:
    done = fedpick.Session.load(case.state).round if case.state is not None and case.state.exists() else 0
    job = LocalJob(
        case.clients,
        dict(case.model),
        differences=differences,
        policy=registry.name_of(case.policy),
        policy_options=registry.parameters(case.policy),
        num_rounds=done + case.rounds,
        budget=case.budget,
        seed=case.seed,
        state=None if case.state is None else str(case.state),
    )
    job.run()
    named = [[[key.removeprefix("name:") for key in keys] for keys in (r.cohort, r.completed)] for r in job.reports]
    return AdapterRun(cohorts=[n[0] for n in named], completed=[n[1] for n in named], model=job._params)


def test_it_conforms():
    check_adapter(run)


def test_differences_are_added_to_the_model():
    from fedpick.testing import adapters

    adapters.exact_weights(lambda case: run(case, differences=True))


def job(count=4, **arguments) -> LocalJob:
    clients = [SmallClient(name=f"site-{k}", target=k + 1.0) for k in range(1, count + 1)]
    return LocalJob(clients, {"w": np.zeros(3)}, **{"num_rounds": 2, **arguments})


def test_a_silent_client_is_late_and_busy_until_its_result_comes():
    federation = job(quorum=0.5, train_timeout=12.5)
    federation.silent = {"site-2"}
    federation.run()
    assert federation.sent[0][2:] == (2, 13)  # enough answers, whole seconds
    assert "name:site-2" in federation.reports[0].late
    assert "name:site-2" not in federation.reports[1].available
    client = SimpleNamespace(name="site-2", token="token of site-2")
    federation.process_result_of_unknown_task(client, "train", "1", None, None)
    assert 1 not in federation._members.busy


def test_a_slow_client_is_asked_less():
    federation = job(num_rounds=8, train_timeout=100.0)
    federation.seconds = {"site-2": 99.0}
    federation.run()
    assert [report.round for report in federation.reports if "name:site-2" in report.cohort] == [1, 3, 7]


def test_decisions_are_in_the_audit_log(tmp_path):
    job(audit=str(tmp_path / "audit.jsonl"), exclude=["name:site-2"]).run()
    found = check(tmp_path / "audit.jsonl")
    assert (found.rounds, found.sentence) == (2, "")
    assert "exclude= names name:site-2" in (tmp_path / "audit.jsonl").read_text()


def test_the_log_names_policy_budget_and_seed(caplog):
    with caplog.at_level("INFO", "fedpick"):
        job(policy="md", budget=2, seed=41).run()
    assert "Policy: md, MD(" in caplog.text and "budget: 2, seed: 41, weights of: the policy" in caplog.text


def test_long_updates_are_clipped():
    federation = job(num_rounds=1, clip_norms=1.0)
    federation.clients["site-4"].target = 1000.0
    federation.run()
    assert np.abs(federation._params["w"]).max() < 5


def test_a_size_in_a_result_is_bounded_at_once():
    federation = job(count=21, num_rounds=1)
    for client in federation.clients.values():
        client.target = 0.0
    federation.clients["site-21"].target, federation.clients["site-21"].num_examples = 2.0, 2**53
    federation.run()
    assert federation._params["w"][0] == pytest.approx(np.exp(2.4) / (20 + np.exp(2.4)))


def test_errors_that_come_at_once_make_no_client_slow():
    federation = job(num_rounds=1)
    for name in ("site-1", "site-2"):
        federation.clients[name].fault = "raises"
    federation.seconds = {"site-3": 30.0, "site-4": 40.0}
    federation.run()
    assert federation._driver.roster.strikes == [0] * 4


def test_eligible_clients_only():
    federation = job(eligible=["name:site-1", "name:site-3"])
    federation.run()
    assert federation._members.roster.keys == ["name:site-1", "name:site-3"]


def test_groups_and_the_options_of_the_guard_are_plain_values():
    groups = {"name:site-1": "north", "name:site-3": "north"}
    federation = job(policy="rpow-d", groups=groups, guard={"most_places": 2.0})
    federation.run()
    assert federation._driver.session.clients.group.tolist() == [0, 1, 0, 1]
    assert federation._driver.session.guard == fedpick.Guard(most_places=2.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "pow-f"}, UnknownName, "pow-d"),
        ({"policy": "pow-d", "policy_options": {"num_candidates": 0}}, InvalidInput, "num_candidates"),
        ({"budget": -1}, InvalidInput, "budget must be"),
        ({"num_rounds": 0}, InvalidInput, "num_rounds"),
        ({"quorum": 1.5}, InvalidInput, "'quorum' parameter of PolicyController"),
        ({"guard": "hard"}, InvalidInput, "guard"),
        ({"reports": "loss"}, InvalidInput, "reports must map"),
        ({"eligible": ["site-1"]}, InvalidInput, "eligible must be"),
        ({"groups": {"site-1": "north"}}, InvalidInput, "groups must be"),
        ({"guard": {"most_place": 2.0}}, InvalidInput, "most_places"),
        ({"policy": "fedgs", "policy_options": {"similarity": "outputs"}}, MissingSignal, "NVFlare's clients cannot"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(arguments, error, message):
    with pytest.raises(error, match=message):
        PolicyController(**arguments)


def test_labels_are_refused_with_the_way_out():
    with pytest.raises(MissingSignal, match='similarity="updates"'):
        job(policy="fedgs").run()
    job(policy="fedgs", policy_options={"similarity": "updates"}, budget=2).run()
    with pytest.raises(MissingSignal, match="choose another policy"):
        job(policy="fedcbs").run()


def test_reports_that_are_not_named_keep_their_usual_metrics():
    usual = {"loss": "loss", "train_loss": "train_loss", "loss_rms": "loss_rms", "duration": "train-time"}
    assert PolicyController()._settings.reports == {**usual, "eval_loss": "loss"}
    assert PolicyController(reports={"duration": "t"})._settings.reports == {
        **usual,
        "duration": "t",
        "eval_loss": "loss",
    }
    assert PolicyController(reports={"eval_loss": "x"})._settings.reports == {**usual, "eval_loss": "x"}


def test_statistics_are_averaged_with_weights_that_sum_to_one():
    sites = [SmallClient(name=f"site-{k}", target=2.0 * k) for k in range(1, 6)]
    model = {"w": np.zeros(3), "bn.running_var": np.ones(2), "bn.num_batches_tracked": np.array(0)}
    federation = LocalJob(sites, model, policy="unbiased", num_rounds=1, seed=1)
    federation.run()
    (selection,) = federation._driver.history
    weights, targets = selection.weights, 2.0 * (selection.clients + 1)
    assert abs(weights.sum() - 1) > 0.05
    mean = weights @ targets / weights.sum()
    np.testing.assert_allclose(federation._params["w"], 0.5 * weights @ targets)
    np.testing.assert_allclose(federation._params["bn.running_var"], 0.5 * (1 + mean))
    batches = federation._params["bn.num_batches_tracked"]
    assert batches.dtype == model["bn.num_batches_tracked"].dtype and batches == round(0.5 * mean)


def test_a_job_without_an_initial_model_or_without_training_ends_with_an_error():
    with pytest.raises(InvalidInput, match="needs an initial model, but the persistor 'persistor' gave none"):
        LocalJob([SmallClient(name="site-1", target=1.0)], {}).run()
    failing = job(2)
    for client in failing.clients.values():
        client.fault = "raises"
    with pytest.raises(TrainingFailed, match="None of 2 rounds changed the model"):
        failing.run()


def test_the_configuration_of_a_job_holds_every_argument(tmp_path):
    federated = FedJob(name="job")
    federated.to_server(
        PolicyController(policy="pow-d", policy_options={"num_candidates": 4}, num_rounds=9, budget=2, quorum=0.8)
    )
    federated.export_job(str(tmp_path))
    (config,) = tmp_path.rglob("config_fed_server.json")
    text = re.sub(r"\s", "", config.read_text())
    for part in ('"policy":"pow-d"', '"num_candidates":4', '"num_rounds":9', '"budget":2', '"quorum":0.8'):
        assert part in text


def simulate(tmp_path: Path, *arguments: str) -> str:
    """Run the example in NVFlare's simulator, and return its log."""
    command = [sys.executable, str(EXAMPLE / "job.py"), "--workspace", str(tmp_path / "workspace"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    return log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options"),
    [("pow-d", '{"num_candidates": 5}'), ("fedcor", '{"warmup": 2, "interval": 2, "dimension": 2}')],
)
def test_a_job_in_the_simulator_survives_a_failing_and_a_killed_client(tmp_path, policy, options):
    state = tmp_path / "state"
    settings = ["--policy", policy, "--options", options, "--budget", "4", "--train-timeout", "20"]
    settings += ["--state", str(state), "--client", "--fail site-2 --die site-5"]
    log = simulate(tmp_path, *settings, "--rounds", "5")
    rounds = re.findall(r"Round (\d+): (\d+) of (\d+) completed in .* s; failed: (.*)", log)
    print(*rounds, sep="\n")
    assert [int(round[0]) for round in rounds] == [1, 2, 3, 4, 5]
    assert all(int(round[1]) >= 2 for round in rounds)
    assert any("name:site-2" in round[3] for round in rounds)
    if policy == "pow-d":  # a trial of fedcor may be what site-5 is killed in
        assert any(re.search("late: .*name:site-5", round[3]) for round in rounds)
    roster = Roster.load(state)
    last = dict(zip(roster.keys, roster.last, strict=True))
    print(last)
    assert last["name:site-5"] <= 1  # it dies in the second round, and is not asked again
    assert last["name:site-1"] == 4
    session = fedpick.Session.load(state)
    assert session.round == 5 and len(session.clients) == 5
    # A second job goes on where the first one ended, with the saved model.
    again = simulate(tmp_path, *settings, "--rounds", "6", "--client", "")
    assert re.findall(r"Round (\d+):", again) == ["6"]
