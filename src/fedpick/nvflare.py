"""Use any fedpick policy in an NVFlare job: a controller with the policy's name and options in its configuration.

    from fedpick.nvflare import PolicyController
    job.to_server(PolicyController(policy="pow-d", policy_options={"num_candidates": 20}, num_rounds=100, budget=10))

The clients are those of any job: they answer the tasks "train" and, for policies that ask for losses, "validate".
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpick.adapter.arrays import Arrays, in_form_of, number
from fedpick.adapter.driver import Driver
from fedpick.adapter.members import Members
from fedpick.adapter.report import Step
from fedpick.adapter.settings import Options, Settings, refuse_unusable_policy, writable_directory
from fedpick.core import registry
from fedpick.core.checkpoint import pack, unpack
from fedpick.core.errors import InvalidInput, MissingDependency, StateFileError, TrainingFailed
from fedpick.core.validation import whole
from fedpick.core.writing import write_atomically

try:
    from nvflare.apis.dxo import MetaKey
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
    from nvflare.app_common.workflows.model_controller import ModelController
except ModuleNotFoundError as error:
    raise MissingDependency(
        "The NVFlare adapter needs NVFlare. Install it with: pip install 'fedpick[nvflare]'"
    ) from error

__all__ = ["PolicyController"]


class PolicyController(ModelController):  # type: ignore[misc]  # NVFlare has no types
    """A workflow that trains rounds whose cohorts, and weights, come from a fedpick policy.

    All arguments are plain values, so that a job's configuration can hold them.

    Args:
        policy: the name of a policy, such as "pow-d".
        policy_options: its hyper-parameters.
        num_rounds: the number of rounds, those before a restart included.
        budget: the largest cohort, or, between 0 and 1, its fraction of the ready clients; None for no limit.
        seed: seed of all random choices.
        state: a directory on the server in which the policy's state and the model are saved after each round, and from
            which they are resumed; created if missing. None saves nothing but the persistor's model.
        eligible: the clients that may take part, as "name:site-1"; None: all may.
        exclude: the clients that may not.
        groups: the group of each client, as {"name:site-1": "north"}; the others are one group together. None: there
            are no groups.
        audit: a file on the server to which every decision is appended, see `fedpick audit`; None writes none.
        cooldown: rounds that a client rests after a round for which it was selected.
        max_share: the largest share of all rounds for which a client is selected, rounded up to whole rounds.
        min_clients: start a round once this many clients are connected ...
        wait: ... or after this many seconds, with those that are.
        ready_timeout: seconds without any ready client after which the job ends with an error.
        overcommit: select this many times the budget, and end the round after as many answers as the budget says.
        quorum: end the round after this share of the cohort (with overcommit: of the budget) has answered.
        probe_timeout: seconds that clients have to answer a question for a loss.
        train_timeout: seconds that clients have to train. A late client counts as failed, and as busy until it answers.
        clip_norms: scale down updates that are longer than this many times the median length in the cohort; None: none.
        reports: Outcome field -> key in the metrics, or the meta, of a result; "eval_loss" is that of a validation.
            Fields that are not named keep their usual keys.
        sketch: how the server describes an update, for policies that learn from it: "head" or "count-sketch".
        guard: what the session does about reports that may be false: "off", "mild", "strict", or the options of a
            `fedpick.Guard`, as {"most_places": 3.0}.
        train_task: the name of the task that trains.
        probe_task: the name of the task that evaluates a model.
        persistor_id: of the component that loads the initial model and saves the new ones.
    """

    def __init__(
        self,
        policy: str = "uniform",
        policy_options: Mapping[str, Any] | None = None,
        num_rounds: int = 3,
        budget: float | None = None,
        seed: int = 0,
        state: str | None = None,
        eligible: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        groups: Mapping[str, str] | None = None,
        audit: str | None = None,
        cooldown: int = 0,
        max_share: float = 1.0,
        min_clients: int = 1,
        wait: float = 60.0,
        ready_timeout: float = 3600.0,
        overcommit: float = 1.0,
        quorum: float = 1.0,
        probe_timeout: float = 60.0,
        train_timeout: float = 3600.0,
        clip_norms: float | None = None,
        reports: Mapping[str, str] | None = None,
        sketch: str = "head",
        guard: str | Mapping[str, Any] = "mild",
        train_task: str = "train",
        probe_task: str = "validate",
        persistor_id: str = "persistor",
    ) -> None:
        # NVFlare writes a component's arguments into the configuration of a job by reading attributes of their names.
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(persistor_id=persistor_id, ignore_result_error=True)
        for name, value in given.items():
            setattr(self, name, value)
        self.num_rounds = whole("PolicyController", "num_rounds", 1, value=num_rounds)
        shared = {name: value for name, value in given.items() if name in Options.__annotations__}
        shared["reports"] = {} if reports is None else reports
        self._settings = Settings(**shared, probe="evaluate", caller="PolicyController")
        if "eval_loss" not in shared["reports"]:  # a validation of NVFlare reports "loss"
            self._settings.reports = {**self._settings.reports, "eval_loss": "loss"}
        self._policy = registry.get(policy, **(policy_options or {}))
        refuse_unusable_policy(self._policy, "NVFlare")
        self._answered: dict[str, float] = {}  # name of a client that answered, errors included -> seconds it took
        self._sent_at = 0.0
        self._names: dict[str, str] = {}  # token of a client -> its name
        self._params: dict[str, NDArray[Any]] = {}

    def run(self) -> None:
        """Train the rounds; called by NVFlare."""
        if self.state is not None:
            self._settings.path = writable_directory(self.state)
        self._driver = driver = Driver(self._policy, self._settings)
        driver.announce()
        self._members = _Members(driver.roster, self._settings, labels_for=driver.labels_for)
        self._params = self._first_model()
        trained = driver.round > 0
        while driver.round < self.num_rounds:
            trained = self._round(driver) or trained
        if not trained:
            raise TrainingFailed(
                f"None of {self.num_rounds} rounds changed the model: no client completed one with a usable result.\n\n"
                "hint: the logs of the clients hold their errors"
            )

    def _first_model(self) -> dict[str, NDArray[Any]]:
        """The model of the saved round, or that of the persistor."""
        if self._driver.round and self._settings.path is not None:
            file = _model_file(self._settings.path, self._driver.round)
            try:
                return dict(unpack(file.read_bytes(), str(file))[0])
            except OSError as error:
                raise StateFileError(f"The model of the saved state is missing: {file}. Restore it.") from error
        loaded = self.load_model()
        params = _arrays(getattr(loaded, "params", None))
        if not params:
            raise InvalidInput(
                f"PolicyController needs an initial model, but the persistor {self.persistor_id!r} gave none. "
                "Add one to the server of the job, such as NPModelPersistor or PTFileModelPersistor."
            )
        return params

    def _round(self, driver: Driver) -> bool:
        """Run one round; return whether it made a step."""
        driver.begin()
        ready = self._members.wait_until_ready(self._update)
        selection = driver.choose(ready, self._params, self)
        results, failed = self._exchange(
            self.train_task, selection.clients, self._params, self.train_timeout, driver.enough
        )
        names = self._client_names(selection.clients)
        in_time = [name for name in results if name in names][: driver.most]
        late = np.array([name not in in_time and name not in failed for name in names], dtype=bool)
        answers = [results[name] if name in in_time else None for name in names]
        metrics = [_metrics(answer) for answer in answers]
        sizes = [found.get("num-examples", found.get(MetaKey.NUM_STEPS_CURRENT_ROUND)) for found in metrics]
        driver.roster.note_sizes(selection.clients, sizes)
        trained = [self._model_of(answer) for answer in answers]
        wrong = {
            place: "it must hold parameters with the model's names and shapes, and finite real numbers"
            for place, new in enumerate(trained)
            if new is None and answers[place] is not None
        }
        driver.warn_of(selection, wrong)
        reports: dict[str, Any] = driver.reports(metrics, self._params, trained)
        new, weights = driver.aggregate(selection, self._params, trained)
        completed = np.array([model is not None and new is not None for model in trained], dtype=bool)
        if new is not None:
            self._params = new
            self.save_model(FLModel(params_type=ParamsType.FULL, params=new))
        if self._settings.path is not None:  # before the state, which could not be resumed without it
            _save_model(self._settings.path, driver.round + 1, self._params)
        driver.tell(selection, completed, weights=weights, late=late, answered=len(results), **reports)
        return new is not None

    def losses(self, clients: NDArray[np.int64], model: Arrays, batch_size: int | None) -> NDArray[np.float64]:
        """The losses that the clients' validation reports, always on all of their validation data."""
        results, _ = self._exchange(self.probe_task, clients, model, self.probe_timeout, len(clients))
        key = self._settings.reports["eval_loss"]
        metrics = [_metrics(results.get(name)) for name in self._client_names(clients)]
        values = np.array([number(found.get(key)) for found in metrics])
        if len(values) and np.isnan(values).all():
            self._settings.log.warning(
                "None of %d validations has a usable %r among its metrics, so the policy chooses without losses: %s. "
                'Name the right key: PolicyController(..., reports={"eval_loss": ...}).',
                *(len(values), key, next((sorted(found) for found in metrics if found), "no answer in time")),
            )
        return values

    def train(self, clients: NDArray[np.int64]) -> list[dict[str, NDArray[Any]] | None]:
        """The models of a trial, which do not enter the model."""
        results, _ = self._exchange(self.train_task, clients, self._params, self.train_timeout, len(clients))
        return [self._model_of(results.get(name)) for name in self._client_names(clients)]

    def _exchange(
        self, task: str, clients: NDArray[np.int64], model: Arrays, timeout: float, enough: int
    ) -> tuple[dict[str, Any], set[str]]:
        """(client name -> its result, in the order of arrival; the clients that answered with an error)."""
        names = self._client_names(clients)
        if not names:
            return {}, set()
        sent = FLModel(
            params_type=ParamsType.FULL,
            params=dict(model),
            current_round=self._driver.round,
            total_rounds=self.num_rounds,
        )
        self._answered, self._sent_at = {}, time.monotonic()
        found = self.send_model_and_wait(
            task_name=task,
            data=sent,
            targets=names,
            min_responses=enough,
            timeout=0 if math.isinf(timeout) else max(1, math.ceil(timeout)),  # whole seconds; 0: for ever
        )
        results = {result.meta["client_name"]: result for result in found}
        answered, waited = dict(self._answered), time.monotonic() - self._sent_at
        silent = [index for index, name in zip(clients, names, strict=True) if name not in answered]
        self._members.busy |= {int(index): task for index in silent}
        step = Step(kind=task, asked=len(names), answered=len(answered), seconds=waited, deadline=timeout)
        self._driver.progress.steps.append(step)
        tokens = dict(zip(names, self._members.roster.nodes(clients), strict=True))
        seconds = {tokens[name]: answered[name] for name in answered if name in tokens}
        failed = set(answered) - set(results)
        errors = [tokens[name] for name in failed if name in tokens]
        self._driver.note_pace(list(tokens.values()), seconds, waited, timeout, errors)
        return results, failed

    def _process_result(self, client_task: Any, fl_ctx: Any) -> None:
        """Note who answered, also with an error, of which NVFlare does not tell a controller."""
        self._answered[client_task.client.name] = time.monotonic() - self._sent_at
        super()._process_result(client_task, fl_ctx)

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Any, fl_ctx: Any
    ) -> None:
        """Drop a late result; its client is free again."""
        self._members.busy.pop(self._members.roster.index_of_node.get(client.token, -1), None)

    def _update(self) -> list[str]:
        """Admit the clients that are new, and return all that are connected."""
        if self.abort_signal.triggered:
            raise TrainingFailed("The job was aborted.")
        connected = {client.token: client for client in self.engine.get_clients()}
        self._names = {token: client.name for token, client in connected.items()}
        new = [token for token in connected if not self._members.roster.knows(token, connected)]
        if new := [token for token in new if token not in self._members.ineligible]:
            self._members.admit({token: {} for token in new}, connected, connected)
        return list(connected)

    def _client_names(self, clients: NDArray[np.int64]) -> list[str]:
        return [self._names[token] for token in self._members.roster.nodes(clients)]

    def _model_of(self, result: Any) -> dict[str, NDArray[Any]] | None:
        """The trained model in a result; None if there is none that fits."""
        params = _arrays(getattr(result, "params", None))
        if params is not None and result.params_type == ParamsType.DIFF:
            if not set(params) <= set(self._params):
                return None
            try:
                params = {name: self._params[name] + array for name, array in params.items()}
            except (ValueError, TypeError):  # shapes or kinds that do not add
                return None
        return None if params is None else in_form_of(self._params, params)


class _Members(Members):
    """The clients of a job, by the token that each has until it connects anew."""

    newest_counts = True  # NVFlare authenticates names

    @property
    def labels_hint(self) -> str:
        """What to do if no client reports a label histogram."""
        return 'NVFlare\'s clients do not report one; choose another policy, or fedgs with similarity="updates"'


def _arrays(params: Any) -> dict[str, NDArray[Any]] | None:
    """The parameters of a result as NumPy arrays; None if they are none."""
    try:
        return {str(name): np.asarray(value) for name, value in params.items()}
    except Exception:  # what a client sends may fail in any way
        return None


def _metrics(result: Any) -> dict[str, Any]:
    """The metrics of a result, and its meta data."""
    if result is None:
        return {}
    return {**(result.meta or {}), **(result.metrics or {})}


def _model_file(path: Path, round: int) -> Path:
    return path / f"model-{round}.npz"


def _save_model(path: Path, round: int, model: Arrays) -> None:
    """Write the model after this many rounds. The one before stays until the policy's state is saved too."""
    write_atomically(_model_file(path, round), pack(dict(model), {"round": round}), private=True)
    for file in path.glob("model-*.npz"):
        if file not in (_model_file(path, round), _model_file(path, round - 1)):
            file.unlink(missing_ok=True)
