"""PyTorch modules in the simulator, against the usual loop and against the JAX engine."""

from __future__ import annotations

import numpy as np
import pytest

import fedpick
from fedpick.core.errors import InvalidInput
from fedpick.core.policy import Signal
from fedpick.core.types import Probe, Selection
from fedpick.sim import Faults, LocalTraining, ServerStep, Simulator, TorchTask, Waiting, devices, simulate, tasks
from tests.sim.naive_loop import make_federation, quadratic_federation
from tests.sim.test_training import SERVERS, SOLVERS

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'fedpick[torch]'")
nn = torch.nn
# These modules import PyTorch.
from fedpick.sim.torch_engine.setup import in_threads  # noqa: E402
from fedpick.sim.torch_engine.task import cross_entropy  # noqa: E402
from fedpick.sim.torch_engine.training import trained  # noqa: E402

COHORTS = [Selection(clients=[4, 0, 2]), Selection(clients=[1, 3, 5, 0], weights=[0.1, 0.5, 0.2, 0.0])]


def perceptron():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def with_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))


def small_cnn():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


def build(module=perceptron, federation=None, local=None, **options):
    local = local or LocalTraining(lr=0.1, steps=3, batch_size=8)
    return Simulator(federation or make_federation(), module, local=local, **{"seed": 3, **options})


def current(simulator, module):
    """The module with the simulator's model."""
    with torch.no_grad():
        for parameter, value in zip(trained(module), simulator.params.weights, strict=True):
            parameter.copy_(value)
    return module


def assert_same(one, other, **tolerance):
    pairs = zip([*one.weights, *one.buffers], [*other.weights, *other.buffers], strict=True)
    for mine, theirs in pairs:
        np.testing.assert_allclose(mine, theirs, **tolerance)


def bits(simulator):
    return [np.asarray(leaf).tobytes() for leaf in simulator.engine.leaves(simulator.params, simulator.velocity)]


def follow(simulator, module, cohorts=COHORTS):
    """Train the same rounds in the usual way and compare after each."""
    from tests.sim.naive_torch_loop import train_round

    module = current(simulator, module)
    for index, selection in enumerate(cohorts):
        module, losses = train_round(simulator, module, selection, index)
        outcome = simulator.train(selection)
        for mine, theirs in zip(simulator.params.weights, trained(module), strict=True):
            np.testing.assert_allclose(mine, theirs.detach(), rtol=2e-4, atol=2e-6)
        for mine, theirs in zip(simulator.params.buffers, module.buffers(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-6)
        np.testing.assert_allclose(outcome.train_loss, losses, rtol=1e-4)
        assert outcome.completed.all()


# Training


@pytest.mark.parametrize("solver", SOLVERS)
def test_local_solvers(solver):
    follow(build(local=SOLVERS[solver]), perceptron())


def test_images_and_server_rate():
    federation = make_federation(sizes=(12, 6, 12), shape=(6, 6, 2))
    simulator = build(small_cnn, federation, server=ServerStep(lr=0.5))
    follow(simulator, small_cnn(), [Selection(clients=[2, 1]), Selection(clients=[0])])


def test_buffers_are_averaged_with_normalised_weights():
    federation = make_federation(sizes=(40, 8, 24))
    simulator = build(with_batch_norm, federation, LocalTraining(lr=0.1, epochs=2, batch_size=8))
    follow(simulator, with_batch_norm(), [Selection(clients=[0, 1, 2], weights=[0.2, 0.1, 0.1], renormalize=False)])
    tracked = simulator.params.buffers[2]
    assert tracked.dtype == torch.int64 and int(tracked) == round((0.2 * 10 + 0.1 * 2 + 0.1 * 6) / 0.4)
    assert simulator.model_bytes == 4 * (6 * 8 + 8 + 8 + 8 + 8 * 3 + 3) + 4 * 16 + 8


class Scaled(nn.Module):
    """With a parameter that is one number, and a gradient that PyTorch gives as an expanded view."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.shift = nn.Linear(6, 3), nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.layer(x) * self.scale + self.shift


@pytest.mark.parametrize("group", [None, 1])
def test_parameters_of_any_shape(group):
    local = LocalTraining(lr=0.1, epochs=2, batch_size=5, momentum=0.5, proximal=0.1, weight_decay=0.01)
    follow(build(Scaled, local=local, group=group), Scaled())


@pytest.mark.parametrize("classes", [2, 10, 16, 20])
def test_the_cross_entropy_is_pytorchs(classes):
    outputs, y = torch.randn(7, classes, requires_grad=True), torch.arange(7) % classes
    mine, theirs = cross_entropy(outputs, y), nn.functional.cross_entropy(outputs, y, reduction="none")
    torch.testing.assert_close(mine, theirs)
    gradients = [torch.autograd.grad(loss.sum(), outputs)[0] for loss in (mine, theirs)]
    torch.testing.assert_close(*gradients)


TASKS = {
    "mlp": ("mlp", {"hidden": (8, 5)}, (6, 6, 1)),
    "cnn-mcmahan-fmnist": ("cnn-mcmahan-fmnist", {}, (8, 8, 1)),
    "cnn-fedcor": ("cnn-fedcor", {}, (20, 20, 2)),
    "logistic ridge": ("logistic", {"ridge": 0.1, "start": "zero-bias"}, (6,)),
}


def to_torch(params, shape):
    """The weights of a model in JAX in PyTorch's order and layout."""
    layers = sorted(params, key=lambda name: (not name.startswith("conv"), name))
    filters = [params[name]["weight"].shape[1] for name in layers if name.startswith("conv")]
    tensors, channels = [], shape[-1]
    for name in layers:
        weight, bias = (np.asarray(params[name][part]) for part in ("weight", "bias"))
        if name.startswith("conv"):
            kernel = round((weight.shape[0] / channels) ** 0.5)
            weight, channels = weight.reshape(kernel, kernel, channels, -1).transpose(3, 2, 0, 1), weight.shape[1]
        else:
            if name == "dense0" and filters:
                side = round((weight.shape[0] / filters[-1]) ** 0.5)
                weight = weight.reshape(side, side, filters[-1], -1).transpose(2, 0, 1, 3).reshape(weight.shape)
            weight = weight.T
        tensors += [torch.tensor(np.ascontiguousarray(weight)), torch.tensor(bias)]
    return tensors


@pytest.mark.parametrize("name", TASKS)
def test_both_engines_give_the_same_model_after_five_rounds(name):
    task, options, shape = TASKS[name]
    federation = make_federation(sizes=(12, 7, 12), shape=shape)
    local = LocalTraining(lr=0.05, epochs=1, batch_size=6, weight_decay=1e-3, momentum=0.5)
    server = ServerStep(lr=0.8, momentum=0.5, weight_decay=0.01)
    both = [
        Simulator(
            federation,
            tasks.get(task, input_shape=shape, num_classes=3, engine=engine, **options),
            local=local,
            server=server,
            seed=2,
        )
        for engine in ("jax", "torch")
    ]
    jax_one, torch_one = both
    torch_one.params = torch_one.params._replace(weights=tuple(to_torch(jax_one.params, shape)))
    for index in range(5):
        cohort = Selection(clients=[index % 3, (index + 1) % 3])
        outcomes = [simulator.train(cohort, report=frozenset({Signal.SKETCH})) for simulator in both]
        np.testing.assert_allclose(outcomes[0].train_loss, outcomes[1].train_loss, rtol=1e-4)
        np.testing.assert_allclose(outcomes[0].update_norm, outcomes[1].update_norm, rtol=1e-3)
        np.testing.assert_allclose(outcomes[0].sketch, outcomes[1].sketch, rtol=1e-2, atol=1e-5)
        for mine, theirs in zip(torch_one.params.weights, to_torch(jax_one.params, shape), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(jax_one.client_losses(), torch_one.client_losses(), rtol=1e-4)
    np.testing.assert_allclose(jax_one.evaluate(), torch_one.evaluate(), rtol=1e-4)
    assert jax_one.counters == torch_one.counters
    probe = Probe(clients=[1, 2], signal=Signal.OUTPUTS)
    np.testing.assert_allclose(jax_one.measure(probe), torch_one.measure(probe), rtol=1e-2, atol=1e-4)


def test_quadratic_on_both_engines():
    local = LocalTraining(lr=1e-3, steps=2, batch_size=None)
    jax_one, torch_one = (
        Simulator(quadratic_federation(), "quadratic", local=local, seed=2, engine=engine)
        for engine in ("jax", "torch")
    )
    torch_one.params = torch_one.params._replace(weights=(torch.tensor(np.asarray(jax_one.params["w"])),))
    for simulator in (jax_one, torch_one):
        simulator.train(Selection(clients=[2, 1]))
    np.testing.assert_allclose(torch_one.params.weights[0], jax_one.params["w"], rtol=1e-5)
    np.testing.assert_allclose(torch_one.client_losses(), jax_one.client_losses(), rtol=1e-4)
    assert Signal.OUTPUTS not in torch_one.provides


ROBUST = {"median": ServerStep(aggregation="median"), "clipped": ServerStep(clip_norms=0.5, lr=0.5)}


@pytest.mark.parametrize("server", [*SERVERS, *ROBUST])
def test_server_steps_on_both_engines(server):
    step = {**SERVERS, **ROBUST}[server]
    options = {"local": LocalTraining(lr=0.1, steps=3, batch_size=8), "server": step, "seed": 1}
    jax_one, torch_one = (Simulator(make_federation(), "logistic", engine=name, **options) for name in ("jax", "torch"))
    torch_one.params = torch_one.params._replace(weights=tuple(to_torch(jax_one.params, (6,))))
    for cohort in (Selection(clients=[4, 0, 2]), Selection(clients=[1, 3], weights=[0.4, 0.8], renormalize=False)):
        for simulator in (jax_one, torch_one):
            simulator.train(cohort)
    for mine, theirs in zip(torch_one.params.weights, to_torch(jax_one.params, (6,)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_stacked_clients_learn_what_each_learns_alone(solver):
    """Modules on which clients are trained as one, against the same without."""
    stacked, alone = (build(local=SOLVERS[solver], group=group) for group in (None, 1))
    assert (stacked.engine.group, alone.engine.group) == (64, 1)
    for selection in COHORTS:
        outcomes = [simulator.train(selection) for simulator in (stacked, alone)]
        np.testing.assert_allclose(outcomes[0].train_loss, outcomes[1].train_loss, rtol=1e-5)
        np.testing.assert_allclose(outcomes[0].update_norm, outcomes[1].update_norm, rtol=1e-4)
        assert_same(stacked.params, alone.params, rtol=1e-4, atol=1e-6)


class MixesExamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x - x.mean(dim=0))


class ReadsANumber(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) * (1 if float(x.sum()) > -1e9 else 2)


@pytest.mark.parametrize("module", [with_batch_norm, with_dropout, MixesExamples, ReadsANumber])
def test_modules_that_cannot_be_stacked_train_one_client_after_another(module):
    simulator = build(module, make_federation(sizes=(40, 8, 24)))
    assert simulator.engine.group == 1
    if module in (MixesExamples, ReadsANumber):
        follow(simulator, module(), [Selection(clients=[0, 2])])


class Frozen(nn.Module):
    """With operations in place and a weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(nn.functional.relu(self.first(x), inplace=True))


class LeavesPyTorch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(torch.from_numpy(np.tanh(x.detach().numpy())))


class ChangesAConstant(Frozen):
    def forward(self, x):
        self.first.bias += 0.0
        return super().forward(x)


RECORDED = {
    perceptron: True,
    Frozen: True,
    small_cnn: False,  # TorchScript cannot record the gradient of a convolution
    with_dropout: False,
    with_batch_norm: False,
    MixesExamples: False,
    ReadsANumber: False,
    LeavesPyTorch: False,
    ChangesAConstant: False,
}


@pytest.mark.parametrize("module", RECORDED)
def test_steps_are_recorded_where_they_are_always_the_same(module):
    """A step that runs as one program, and steps that cannot, against the usual loop."""
    federation = make_federation(sizes=(40, 8, 24, 15), shape=(6, 6, 2) if module is small_cnn else (6,))
    local = LocalTraining(lr=0.1, epochs=2, batch_size=8)  # the last batch of a client with 15 examples has 7
    simulator = build(module, federation, local, group=1)
    assert simulator.engine.facts["traced"] == RECORDED[module]
    if module not in (with_dropout, Frozen, ChangesAConstant):
        follow(simulator, module(), [Selection(clients=[0, 3, 1]), Selection(clients=[3, 2])])
    if module is Frozen:
        made = module()
        made.first.bias.data.copy_(simulator.engine._module.first.bias)
        follow(simulator, made, [Selection(clients=[0, 3, 1])])


class Wide(nn.Module):
    """With products that oneDNN computes: more than 2^21 multiplications, in a batch of 8."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 560), nn.Linear(560, 560), nn.Linear(560, 3)

    def forward(self, x):
        return self.last(torch.relu(self.second(torch.relu(self.first(x))[:, None]))[:, 0])


def test_large_dense_layers_by_onednn():
    federation = make_federation(sizes=(40, 8, 24, 14))
    simulator = build(Wide, federation, LocalTraining(lr=0.1, epochs=2, batch_size=8))
    assert simulator.engine.facts["traced"]
    follow(simulator, Wide(), [Selection(clients=[0, 3, 1]), Selection(clients=[3, 2])])


# Determinism


@pytest.mark.parametrize("module", [perceptron, with_dropout, small_cnn, Wide])
def test_a_client_does_the_same_in_any_cohort_and_with_any_number_of_threads(module):
    shape = (6, 6, 2) if module is small_cnn else (6,)
    federation = make_federation(shape=shape)
    clients = np.arange(6)
    alone = [
        build(module, federation, shards=1).measure(Probe(clients=[client], signal=Signal.UPDATE))[0]
        for client in clients
    ]
    for shards in (1, 2, 5):
        simulator = build(module, federation, shards=shards)
        together = simulator.measure(Probe(clients=clients[::-1].copy(), signal=Signal.UPDATE))
        assert np.array_equal(together, np.stack(alone)[::-1])
    assert len(np.unique(np.stack(alone), axis=0)) == 6


@pytest.mark.parametrize("ours", [1, 2])
def test_a_thread_that_trains_uses_one_core_whatever_the_program_uses(ours):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(ours)
        count = 10 + ours  # no pool of this size was started before
        assert set(in_threads(lambda _: torch.get_num_threads(), range(3 * count), count)) == {1}
        assert torch.get_num_threads() == ours
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("module", [with_dropout, with_batch_norm])
def test_a_resumed_run_ends_in_the_same_bytes(module, tmp_path):
    federation = make_federation(sizes=(40, 8, 24, 16))
    options = {"server": ServerStep(momentum=0.9), "faults": Faults(dropout=0.2, nan=0.2)}
    whole, first, second = (build(module, federation, shards=shards, **options) for shards in (2, 1, 3))
    cohorts = [Selection(clients=[0, 2, 1]), Selection(clients=[3, 1]), Selection(clients=[2, 0])]
    for cohort in cohorts:
        whole.train(cohort)
    first.train(cohorts[0])
    first.save(tmp_path / "model.npz")
    torch.manual_seed(12345)
    second.load(tmp_path / "model.npz")
    for cohort in cohorts[1:]:
        second.train(cohort)
    assert bits(second) == bits(whole) and second.counters == whole.counters


def test_the_seed_decides_the_initial_model_and_the_users_generator_is_left_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, same, other = build(with_dropout), build(with_dropout), build(with_dropout, seed=4)
    one.train(COHORTS[0])
    assert torch.equal(before, torch.get_rng_state())
    assert bits(build(with_dropout)) == bits(same) != bits(other)


def test_a_module_starts_every_seed_at_its_own_weights_and_keeps_them():
    module = perceptron()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    for seed in (0, 1):
        simulator = build(module, seed=seed)
        assert all(torch.equal(mine, own) for mine, own in zip(simulator.params.weights, before, strict=True))
        simulator.train(COHORTS[0])
    assert all(torch.equal(mine, own) for mine, own in zip(module.parameters(), before, strict=True))


# Faults and divergence


def test_an_update_that_is_not_finite_is_left_out():
    federation = make_federation(sizes=(40, 8, 24))
    simulator = build(with_batch_norm, federation, faults=Faults(nan=1.0))
    before = bits(simulator)
    outcome = simulator.train(Selection(clients=[0, 1]))
    assert not outcome.completed.any() and bits(simulator) == before
    diverging = build(perceptron, local=LocalTraining(lr=1e30, steps=9, batch_size=8))
    outcome = diverging.train(Selection(clients=[0, 1]))
    assert (
        not outcome.completed.any() and np.isfinite(np.concatenate([w.ravel() for w in diverging.params.weights])).all()
    )


def test_late_answers_change_the_weights_and_not_the_buffers():
    options = {
        "devices": devices.get("lognormal", spread=1.0, jitter=0.3),
        "waiting": Waiting(overcommit=1.5, late="stale", stale_weight="equal"),
    }
    federation = make_federation(sizes=(40, 8, 24, 16, 32, 8))
    simulator = build(with_batch_norm, federation, **options)
    session = fedpick.Session(fedpick.policies.get("uniform"), simulator.clients, seed=1)
    used = 0
    for _ in simulate(simulator, session, rounds=10, budget=2):
        used += simulator.stale is not None
    assert used > 2
    # Every client takes 3 steps a round, and every round averages the counts of clients that started at the same one.
    assert int(simulator.params.buffers[2]) == 30
    assert all(bool(torch.isfinite(weight).all()) for weight in simulator.params.weights)


def test_an_empty_cohort_and_a_client_without_data_change_nothing():
    federation = make_federation(sizes=(8, 0, 8))
    simulator = build(perceptron, federation, LocalTraining(lr=0.1, steps=2, batch_size=4, weight_decay=0.1))
    before = bits(simulator)
    simulator.train(Selection(clients=[]))
    outcome = simulator.train(Selection(clients=[1], weights=[1.0]))
    assert bits(simulator) == before and np.isnan(outcome.train_loss).all()


# Probes and policies


def test_sketches_keep_inner_products_and_trials_commit_nothing():
    simulator = build(update_length=4096)
    probe = Probe(clients=[0, 3], signal=Signal.UPDATE)
    sketches, whole = simulator.measure(probe), build().measure(probe)
    np.testing.assert_allclose(sketches @ sketches.T, whole @ whole.T, rtol=0.2)
    before = bits(simulator)
    trial = simulator.trial_params(COHORTS[0])
    assert bits(simulator) == before
    simulator.train(COHORTS[0])
    assert_same(simulator.params, trial, rtol=0)


@pytest.mark.parametrize("name", fedpick.policies.names())
def test_every_policy_runs(name):
    simulator = build(perceptron, make_federation(sizes=(20, 12, 23, 14, 9, 30, 11, 25)))
    policy = fedpick.policies.get(name)
    session = fedpick.Session(policy, simulator.clients, seed=1, provides=simulator.provides)
    records = list(simulate(simulator, session, rounds=3, budget=3, losses_every=1))
    assert len(records) == 3 and all(np.isfinite(record.objective) for record in records)


# Modules that cannot work


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.pointer += 1
        return self.layer(x)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x), x


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) + (0 if self.calls < 2 else torch.rand(3))


def mean_loss(outputs, y):
    return nn.functional.cross_entropy(outputs, y)


BAD = {
    "outputs of the wrong shape": (lambda: nn.Linear(6, 2), "must return outputs of shape \\(4, 3\\) for 4 examples"),
    "wrong inputs": (lambda: nn.Linear(5, 3), "failed on 4 examples, arrays of shape \\(4, 6\\)"),
    "two outputs": (Pair, "must return one tensor of outputs. Got tuple"),
    "a buffer without an average": (Counting, "the buffer 'pointer'.* has no average"),
    "half precision": (lambda: nn.Linear(6, 3).half(), "Models train in float32.* Call .float\\(\\)"),
    "lazy": (lambda: nn.LazyLinear(3), "has no shape yet"),
    "nothing to train": (lambda: nn.Linear(6, 3).requires_grad_(False), "no parameters to train"),
    "no module": (lambda: 5, "must be a torch.nn.Module or a function that returns one. It returns int"),
    "an error": (lambda: 1 / 0, "Building the module of the task .* failed: ZeroDivisionError"),
    "one example": (with_batch_norm, "cannot train on one example .*Client 4 has 1 examples"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_module_that_cannot_work_is_refused_before_the_first_round(kind):
    module, message = BAD[kind]
    with pytest.raises(InvalidInput, match=message):
        build(module)


def test_a_loss_that_is_not_per_example_is_refused():
    with pytest.raises(InvalidInput, match=r"one number per example, 4 for 4 of them. Got float32 of shape \(\)"):
        build(TorchTask(name="mean", module=perceptron, loss=mean_loss))
    with pytest.raises(InvalidInput, match="has no gradient"):
        build(TorchTask(name="cut", module=perceptron, loss=lambda outputs, y: outputs.detach().sum(dim=1)))
    with pytest.raises(InvalidInput, match="The correct of the task 'shape'"):
        build(TorchTask(name="shape", module=perceptron, correct=lambda outputs, y: outputs))


def test_random_numbers_in_some_steps_only_are_refused():
    with pytest.raises(InvalidInput, match="draws random numbers in some training steps only"):
        build(Sometimes, shards=1).train(Selection(clients=[0, 2, 3]))


def test_what_is_no_task_is_refused():
    with pytest.raises(InvalidInput, match=r"The task must be the name of one.* Got int"):
        build(5)
    with pytest.raises(InvalidInput, match="'engine' chooses for tasks given by name"):
        build(perceptron, engine="torch")
    with pytest.raises(InvalidInput, match="'jax' or 'torch'"):
        build("mlp", engine="tensorflow")
