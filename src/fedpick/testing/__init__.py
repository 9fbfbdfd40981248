"""The conformance kit: `check_policy` checks that a policy keeps the contract, `check_adapter` an adapter.

Authors of policies call it from their own tests; `fedpick check NAME` runs it. A check is a function of a policy that
raises `PolicyCheckFailed` with one sentence. `CHECKS` lists the checks by name. They use a made-up federation.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fedpick.core import registry
from fedpick.core import state as states
from fedpick.core.arrays import FloatArray
from fedpick.core.errors import FedpickError, FedpickWarning, PolicyCheckFailed
from fedpick.core.guard import REPORT_LIMIT
from fedpick.core.policy import Policy, Signal
from fedpick.core.rng import Purpose, stream
from fedpick.core.session import Session
from fedpick.core.types import Probe, Selection, aggregation_weights
from fedpick.testing.adapters import AdapterCase, AdapterRun, SmallClient, check_adapter
from fedpick.testing.federation import FakeFederation

__all__ = ["CHECKS", "AdapterCase", "AdapterRun", "FakeFederation", "SmallClient", "check_adapter", "check_policy"]

AnyPolicy = Policy[Any]

MEMORY_LIMIT = 2**30
"""Most bytes that one round at a million clients may allocate."""
SECONDS_LIMIT = 60.0
"""Most processor seconds that one round at a million clients may take."""


def _fail(policy: AnyPolicy, sentence: str) -> PolicyCheckFailed:
    return PolicyCheckFailed(f"{type(policy).__name__}: {sentence}")


def fingerprint(selections: list[Selection]) -> str:
    """Return a hash of the clients and weights, exact to the last bit."""
    digest = hashlib.sha256()
    for selection in selections:
        digest.update(selection.clients.tobytes() + b"|")
        digest.update(b"none" if selection.weights is None else selection.weights.tobytes())
        digest.update(str(selection.renormalize).encode())
    return digest.hexdigest()


def same_seed_same_selections(policy: AnyPolicy) -> None:
    """Two runs with one seed select the same clients."""
    world = FakeFederation()
    first, second = (fingerprint(world.play(Session(policy, world.clients(), 3), 40)) for _ in range(2))
    if first != second:
        raise _fail(policy, "two runs with the same seed chose different clients; use only the rng that is passed in.")


def same_selections_in_other_processes(policy: AnyPolicy) -> None:
    """Processes with different hash seeds select the same clients."""
    policy_class = type(policy)
    if policy_class.__module__ == "__main__" or "<locals>" in policy_class.__qualname__:
        return  # cannot be imported from another process
    path = f"{policy_class.__module__}:{policy_class.__qualname__}"
    command = [sys.executable, "-m", "fedpick.testing", path, json.dumps(registry.parameters(policy))]
    paths = os.pathsep.join(folder for folder in sys.path if folder)
    children = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [child.communicate() for child in children]
    if any(child.returncode for child in children):
        raise _fail(policy, f"it does not run in a fresh process: {outputs[0][1].strip()[-500:]}")
    if outputs[0][0] != outputs[1][0]:
        raise _fail(policy, "processes with different hash seeds chose different clients; do not iterate over sets.")


def save_and_load_at_every_round(policy: AnyPolicy) -> None:
    """A run that is saved and loaded after every round equals the uninterrupted one."""
    world = FakeFederation()
    whole = world.play(Session(policy, world.clients(), 5), 40)
    session = Session(policy, world.clients(), 5)
    pieces = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(40):
            pieces += world.play(session, 1)
            session.save(folder)
            session = Session.load(folder, policy=policy)
    for index, (expected, got) in enumerate(zip(whole, pieces, strict=True)):
        if fingerprint([expected]) != fingerprint([got]):
            raise _fail(
                policy,
                f"saved and loaded after every round, it chose differently in round {index}; "
                "something it remembers is not in its state.",
            )


def _frozen(state: Any) -> Any:
    """Return the state with read-only arrays."""
    changes = {}
    for item in states.fields_of(state):
        value = getattr(state, item.name)
        if isinstance(value, np.ndarray):
            value = value.copy()
            value.flags.writeable = False
            changes[item.name] = value
    return replace(state, **changes)


def arguments_are_never_modified(policy: AnyPolicy) -> None:
    """The policy does not write to states and records."""
    world = FakeFederation()
    session = Session(policy, world.clients(), 1)
    try:
        for _ in range(30):
            session._state = _frozen(session._state)
            world.play(session, 1)
    except ValueError as error:
        if "read-only" in str(error):
            raise _fail(policy, "it writes to an array of its arguments; return a new state instead.") from error
        raise


def only_tell_commits(policy: AnyPolicy) -> None:
    """Asking twice in a round gives the same selection."""
    world = FakeFederation()
    session = Session(policy, world.clients(), 2)
    for index in range(20):
        mask, measure = world.available(index, 20), world.measure(index, 20)
        first = session.ask(available=mask, budget=3, measure=measure)
        second = session.ask(available=mask, budget=3, measure=measure)
        if fingerprint([first]) != fingerprint([second]):
            raise _fail(policy, "asked twice in one round, it answered differently; only tell may change its state.")
        session.tell(world.outcome(index, second))


def keeps_within_the_round(policy: AnyPolicy) -> None:
    """Selected clients are available, unique and within the budget, for any budget."""
    world = FakeFederation()
    for budget in (None, 1, 4, 20, 50):
        session = Session(policy, world.clients(), 4)
        for selection in world.play(session, 30, budget):
            weights = aggregation_weights(selection, np.ones(len(selection.clients), dtype=bool), session.clients)
            if not np.isfinite(weights).all():
                raise _fail(policy, f"with a budget of {budget} it gave weights that are not finite.")


def nobody_available(policy: AnyPolicy) -> None:
    """A round without available clients has an empty selection and is told like any other."""
    world = FakeFederation()
    session = Session(policy, world.clients(), 0)
    for index in range(5):
        selection = session.ask(available=np.zeros(20, dtype=bool), budget=5, measure=world.measure(index, 20))
        if len(selection.clients):
            raise _fail(policy, "it selected a client in a round without available clients.")
        session.tell(world.outcome(index, selection))


def one_client(policy: AnyPolicy) -> None:
    """A federation of one client works, and the client is selected."""
    world = FakeFederation(num_clients=1)
    chosen = sum(len(selection.clients) for selection in world.play(Session(policy, world.clients(), 0), 40, 1))
    if chosen == 0:
        raise _fail(policy, "with a single client it never chose it in 40 rounds.")


def everybody_fails(policy: AnyPolicy) -> None:
    """The policy continues to select after rounds in which no client completes."""
    world = FakeFederation(dropout=1.0)
    chosen = world.play(Session(policy, world.clients(), 0), 40)
    if not any(len(selection.clients) for selection in chosen[20:]):
        raise _fail(policy, "it stopped selecting after 20 rounds in which no client completed.")


def answers_come_late(policy: AnyPolicy) -> None:
    """The policy continues to select when some answers come a round after their own."""
    world = FakeFederation()
    session = Session(policy, world.clients(), 0)
    late = np.empty(0, dtype=np.int64)
    chosen = 0
    for index in range(40):
        mask = world.available(index, 20)
        mask[late] = False  # they are busy
        selection = session.ask(available=mask, budget=4, measure=world.measure(index, 20))
        outcome = world.outcome(index, selection)
        stale = world.outcome(index, Selection(clients=late))
        slow = outcome.clients % 3 == 0
        reports: dict[str, Any] = {
            name: np.where(slow, np.nan, getattr(outcome, name).T).T
            for name in ("loss", "train_loss", "loss_rms", "sketch")
        }
        session.tell(replace(outcome, completed=outcome.completed & ~slow, late=slow, **reports).with_stale(stale))
        late = outcome.clients[slow]
        chosen += len(selection.clients)
    if chosen == 0:
        raise _fail(policy, "with late answers it never selected a client.")


def odd_reports(policy: AnyPolicy) -> None:
    """The policy handles equal, missing and absurd reports. No absurd number enters its state."""
    for reports in ("equal", "silent", "absurd"):
        world = FakeFederation(reports=reports)
        session = Session(policy, world.clients(), 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedpickWarning)  # the reports are missing on purpose
            selections = world.play(session, 40)
        if not any(len(selection.clients) for selection in selections):
            raise _fail(policy, f"with {reports} reports it never selected a client.")
        for item in states.fields_of(session.state):
            value = getattr(session.state, item.name)
            if isinstance(value, (float, np.ndarray)) and np.issubdtype(np.asarray(value).dtype, np.floating):
                finite = np.asarray(value)[~np.isnan(value)]
                if finite.size and not np.abs(finite).max() <= REPORT_LIMIT:
                    raise _fail(policy, f"with {reports} reports an infinite or absurd number entered its {item.name}.")


def clients_join(policy: AnyPolicy) -> None:
    """Newcomers do not take most of the places."""
    world = FakeFederation()
    session = Session(policy, world.clients(), 0)
    world.play(session, 60)
    session.grow(world.clients(25))
    places = np.concatenate([selection.clients for selection in world.play(session, 10)])
    if len(places) and np.mean(places >= 20) > 0.6:
        raise _fail(
            policy,
            f"5 newcomers among 25 clients took {np.mean(places >= 20):.0%} of the places in the 10 rounds after they "
            "joined; start them at the mean of the others.",
        )


def dead_clients_are_not_picked_for_ever(policy: AnyPolicy) -> None:
    """Clients that never complete do not take most of the places."""
    world = FakeFederation(num_clients=25, dead=(3, 8, 13, 18, 23), dropout=0.0)
    places = np.concatenate([chosen.clients for chosen in world.play(Session(policy, world.clients(), 0), 80)[30:]])
    share = float(np.isin(places, world.dead).mean()) if len(places) else 0.0
    if share > 0.5:
        raise _fail(policy, f"5 of 25 clients never complete, yet they got {share:.0%} of the places; count attempts.")


def global_randomness_is_untouched(policy: AnyPolicy) -> None:
    """Neither NumPy's global generator nor the random module is used."""
    world = FakeFederation()
    before = (random.getstate(), [str(part) for part in np.random.get_state(legacy=False).items()])  # noqa: NPY002
    world.play(Session(policy, world.clients(), 0), 30)
    after = (random.getstate(), [str(part) for part in np.random.get_state(legacy=False).items()])  # noqa: NPY002
    if before != after:
        raise _fail(policy, "it used the global random generator; use only the rng that is passed in.")


def unbiased_if_it_says_so(policy: AnyPolicy) -> None:
    """Mean weights match the importance, by Monte Carlo; a correct policy fails once in about a million checks."""
    if not policy.unbiased:
        return
    world = FakeFederation(num_clients=6)
    clients, trials = world.clients(), 4000
    weights = np.zeros((trials, 6))
    for trial in range(trials):
        selection = Session(policy, clients, trial).ask(budget=3, measure=world.measure(0, 6))
        everyone = np.ones(len(selection.clients), dtype=bool)
        weights[trial, selection.clients] = aggregation_weights(selection, everyone, clients)
    error = np.abs(weights.mean(axis=0) - clients.importance)
    deviation = weights.std(axis=0) / np.sqrt(trials) + 1e-12
    if (error / deviation).max() > 5.2:
        worst = int(np.argmax(error / deviation))
        raise _fail(
            policy,
            f"it claims to be unbiased, but client {worst} has a mean weight of {weights[:, worst].mean():.4f} "
            f"and an importance of {clients.importance[worst]:.4f}.",
        )


def one_million_clients(policy: AnyPolicy, num_clients: int = 1_000_000) -> None:
    """Rounds over a million clients stay within a stated memory and time."""
    world = FakeFederation(num_clients=num_clients)
    session = Session(policy, world.clients(), 0)
    seconds, peak = [], 0
    # Time first, memory afterwards: tracing makes Python code many times slower.
    for index, traced in enumerate((False, False, True)):
        mask = world.available(index, num_clients)
        answers = 1.0 + stream(0, index, Purpose.MEASURE).random((num_clients, 8))

        def measure(probe: Probe, answers: FloatArray = answers) -> FloatArray:
            return answers[probe.clients] if probe.signal is not Signal.LOSS else answers[probe.clients, 0]

        if traced:
            tracemalloc.start()
        start = time.process_time()  # processor time, so that a busy machine does not fail a policy
        selection = session.ask(available=mask, budget=100, measure=measure)
        session.tell(world.outcome(index, selection))
        if traced:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        else:
            seconds.append(time.process_time() - start)
    if peak > MEMORY_LIMIT:
        raise _fail(policy, f"a round over {num_clients:,} clients took {peak / 2**20:.0f} MiB; the limit is 1024.")
    if max(seconds) > SECONDS_LIMIT:
        raise _fail(
            policy,
            f"a round over {num_clients:,} clients took {max(seconds):.0f} processor seconds; the limit is "
            f"{SECONDS_LIMIT:.0f}. Use arrays, no per-client objects or loops.",
        )


CHECKS: dict[str, Callable[[AnyPolicy], None]] = {
    check.__name__: check
    for check in (
        same_seed_same_selections,
        same_selections_in_other_processes,
        save_and_load_at_every_round,
        arguments_are_never_modified,
        only_tell_commits,
        keeps_within_the_round,
        nobody_available,
        one_client,
        everybody_fails,
        answers_come_late,
        odd_reports,
        clients_join,
        dead_clients_are_not_picked_for_ever,
        global_randomness_is_untouched,
        unbiased_if_it_says_so,
        one_million_clients,
    )
}
"""The checks by name. Each takes a policy and raises `PolicyCheckFailed` if the policy breaks the contract."""


def check_policy(
    policy: AnyPolicy, *, on_check: Callable[[str, str | None], None] = lambda name, failure: None
) -> None:
    """Run every check on a policy. Raise `PolicyCheckFailed` with one sentence per failed check.

    `on_check(name, failure)` is called after each check; `failure` is its sentence, or None if the policy passed.

    >>> check_policy(registry.get("uniform"))
    """
    failures = []
    for name, check in CHECKS.items():
        failure = None
        try:
            check(policy)
        except PolicyCheckFailed as failed:
            failure = str(failed)
        except FedpickError as error:
            failure = f"{type(policy).__name__}: {name}: {error}"
        except Exception as error:  # a policy under test may raise anything; its author needs the name of the check
            failure = f"{type(policy).__name__}: {name} ended in {type(error).__name__}: {error}."
        on_check(name, failure)
        if failure is not None:
            failures.append(failure)
    if failures:
        raise PolicyCheckFailed("\n".join(failures))
