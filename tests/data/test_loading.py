"""Data and tasks of users in specs: `package.module:function`, from the check of the spec to the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedpick import data
from fedpick.core import imports
from fedpick.core.errors import FedpickError, InvalidInput, UnknownName
from fedpick.experiments.runner import run
from fedpick.experiments.spec import SpecError, load_spec
from fedpick.experiments.store import Store
from fedpick.sim import tasks

MODULE = '''
"""A module of a user."""

import numpy as np
from pathlib import Path

from fedpick.data import Dataset
from fedpick.sim import Task

not_a_function = 3


def load(*, shift: float, num_people: int = 6, seed: int = 0) -> Dataset:
    """Points of two kinds."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=40 * num_people)
    points = rng.normal(labels[:, None] * shift, 1.0, size=(len(labels), 3)).astype(np.float32)
    return Dataset(name="points", train_x=points, train_y=labels, test_x=points[:50], test_y=labels[:50],
                   num_classes=2, groups=np.arange(len(labels)) % num_people)


def anything(**options):
    """Takes what comes."""
    return load(shift=1.0, num_people=options["people"])


def from_file(*, path: Path):
    points = np.load(path)
    return Dataset(name="file", train_x=points, train_y=points[:, 0] > 0, num_classes=2,
                   groups=np.arange(len(points)) % 4)


def model(*, num_classes: int, width: int = 3) -> Task:
    """A linear model."""
    import jax
    import jax.numpy as jnp

    def logits(params, x):
        return x @ params["weight"] + params["bias"]

    return Task(
        name=f"linear-{width}",
        init=lambda key: {"weight": jnp.zeros((width, num_classes)), "bias": jnp.zeros(num_classes)},
        per_example_loss=lambda params, x, y, key, train: -jnp.take_along_axis(
            jax.nn.log_softmax(logits(params, x)), y[:, None], axis=1
        )[:, 0],
        correct=lambda params, x, y: logits(params, x).argmax(axis=1) == y,
    )


def nothing():
    return [1, 2, 3]


def broken():
    return {}["a key that is not there"]
'''

SPEC = """
[data]
name = "{module}:load"
shift = 2.0
[partition]
name = "natural"
[task]
name = "{module}:model"
[local]
lr = 0.5
steps = 4
batch_size = 16
[run]
rounds = 3
budget = 2
seeds = 2
local_accuracy_every = 1
[[policies]]
name = "uniform"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module beside which specs can be written, but which is not the working directory."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(imports, "_directories", [])
    name = f"own_{abs(hash(tmp_path))}"
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / f"{name}.py").write_text(MODULE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    yield name
    sys.modules.pop(name, None)


def write(tmp_path, module, **changes):
    text = SPEC.format(module=module)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "beside" / "own.toml"
    file.write_text(text)
    return file


def rows_of(store, experiment):
    return {
        (each.label, each.seed): (store.rounds(each.id, limit=9)["accuracy"], each.federation_id)
        for each in store.runs(experiment.id)
    }


def test_a_spec_with_data_and_task_of_a_user_runs_here_and_in_processes(tmp_path, module):
    spec = load_spec(write(tmp_path, module))
    rows = []
    for processes in (1, 2):
        store = Store(tmp_path / f"{processes}.sqlite")
        report = run(spec, store, processes=processes)
        assert report.complete, report.failures
        rows.append(rows_of(store, report.experiment))
        federation = store.federation(store.runs(report.experiment.id)[0].federation_id)
        assert federation.data == "points" and federation.num_classes == 2
        # There are no local tests, so nothing is stored although the spec asks for it.
        assert np.isnan(store.rounds(store.runs(report.experiment.id)[0].id)["local_accuracy"].astype(float)).all()
    for key, (accuracies, _) in rows[0].items():
        assert np.array_equal(accuracies, rows[1][key][0])
        assert accuracies[-1] > 0.8
    # Every run's seed makes its own data, as for generated sets that come with fedpick.
    assert rows[0]["uniform", 0][1] != rows[0]["uniform", 1][1]


def test_the_command_finds_modules_beside_the_spec_and_in_the_working_directory(tmp_path, module):
    spec = write(tmp_path, module, **{"rounds = 3": "rounds = 1"})
    script = Path(sys.executable).with_name("fedpick")
    command = [str(script), "run", str(spec), "--no-report", "--quiet", "-p", "1", "--store", "a.sqlite"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    moved = tmp_path / "elsewhere" / f"{module}.py"
    (tmp_path / "beside" / f"{module}.py").rename(moved)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    moved.unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path / "elsewhere")
    assert done.returncode == 2
    assert f"own.toml:3: [data]: The data set '{module}:load' cannot be imported: there is no module" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        (":load", ":lod", 3, r"no function or class in own_\d+ named 'lod'. Did you mean 'load'\?"),
        (":model", ":modle", 8, r"named 'modle'. Did you mean 'model'\?"),
        (":load", ":not_a_function", 3, "must be a function or a class. It is a int"),
        (":load", ".py:load", 3, r"expected 'package.module:function'.*Leave out the \.py"),
        (":load", "/load.py:x", 3, "dots between folders"),
        (":load", "", 3, r"no data set named 'own_\d+'.*Your own is named 'package.module:function'"),
        ("shift = 2.0", "shift = 'far'", 4, "'shift' must be a number. Got 'far'"),
        ("shift = 2.0", "shift = 1\nshit = 2.0", 5, "has no key 'shit'. Did you mean 'shift'"),
        ("shift = 2.0", "", 2, "needs the key 'shift'"),
        ("shift = 2.0", "shift = 1\nseed = 'one'", 5, "'seed' must be a whole number"),
        (':model"', ':model"\ndepth = 3', 9, "has no key 'depth'"),
        (':model"', ':model"\nnum_classes = 3', 9, "has no key 'num_classes'"),
    ],
)
def test_specs_are_checked_before_anything_runs(tmp_path, module, old, new, line, says):
    with pytest.raises(SpecError, match=says) as caught:
        load_spec(write(tmp_path, module, **{old: new}))
    assert caught.value.problems[0][0] == line


def test_a_module_that_fails_says_where(tmp_path, module):
    (tmp_path / "beside" / f"{module}.py").write_text("import numpy\n\nnumpy.no_such_thing\n")
    with pytest.raises(
        SpecError, match=rf"cannot be imported: AttributeError.*no_such_thing.*\({module}\.py, line 3\)"
    ):
        load_spec(write(tmp_path, module))
    (tmp_path / "beside" / f"{module}.py").write_text("import a_package_nobody_has\n")
    sys.modules.pop(module, None)
    with pytest.raises(SpecError, match="ModuleNotFoundError: No module named 'a_package_nobody_has'"):
        load_spec(write(tmp_path, module))


def test_from_python(tmp_path, module, monkeypatch):
    monkeypatch.chdir(tmp_path / "beside")
    assert data.load(f"{module}:load", shift=1.0, seed=3).name == "points"
    assert data.describe(f"{module}:load") == "Points of two kinds."
    assert data.cite(f"{module}:load") == "" and data.fetch(f"{module}:load") == []
    np.save("points.npy", np.ones((8, 3), np.float32))
    assert len(data.load(f"{module}:from_file", path="points.npy")) == 8
    assert len(data.load(f"{module}:anything", people=3, further=1)) == 120
    task = tasks.get(f"{module}:model", input_shape=(3,), num_classes=2)
    assert task.name == "linear-3" and task is tasks.get(f"{module}:model", input_shape=(3,), num_classes=2)
    assert tasks.describe(f"{module}:model") == "A linear model."


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda name: data.load(f"{name}:load", shift=1.0, size=3),
            InvalidInput,
            "no option 'size'.*shift, num_people",
        ),
        (lambda name: data.load(f"{name}:nothing"), InvalidInput, r"must return a fedpick\.data\.Dataset. Got list"),
        (
            lambda name: data.load(f"{name}:broken"),
            InvalidInput,
            r"raised an error: KeyError.*\(own_\d+\.py, line [56]\d\)",
        ),
        (
            lambda name: tasks.get(f"{name}:nothing"),
            InvalidInput,
            r"must return a fedpick\.sim\.Task or a torch\.nn\.Module\. Got list",
        ),
        (
            lambda name: tasks.get(f"{name}:model", num_classes=2, deep=1),
            InvalidInput,
            "has the options num_classes, wid",
        ),
        (lambda name: tasks.get(f"{name}:mod"), UnknownName, "Did you mean 'model'"),
        (lambda name: data.load(f"{name}_:load"), InvalidInput, "there is no module"),
    ],
)
def test_mistakes_are_explained(tmp_path, module, monkeypatch, make, error, says):
    monkeypatch.chdir(tmp_path / "beside")
    with pytest.raises(error, match=says):
        make(module)
    assert issubclass(error, FedpickError)


def test_a_changed_data_file_is_noticed(tmp_path, module):
    points = tmp_path / "points.npy"
    rng = np.random.default_rng(0)
    np.save(points, rng.normal(size=(80, 3)).astype(np.float32))
    file = write(
        tmp_path, module, **{":load": ":from_file", "shift = 2.0": f"path = '{points}'", "seeds = 2": "seeds = 1"}
    )
    store = Store(tmp_path / "a.sqlite")
    assert run(load_spec(file), store, processes=1).complete
    np.save(points, rng.normal(size=(80, 3)).astype(np.float32))
    with pytest.raises(InvalidInput, match="is not the one this run was begun with"):
        run(load_spec(file).override(rounds=5), store, processes=1)


def test_two_modules_of_one_name_are_not_mixed_up(tmp_path, module, monkeypatch):
    load_spec(write(tmp_path, module))
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{module}.py").write_text(MODULE.replace("Points of two kinds", "Something else"))
    (other / "own.toml").write_text(SPEC.format(module=module))
    with pytest.raises(SpecError, match=rf"could be in .*beside/{module}\.py or in .*other/{module}\.py"):
        load_spec(other / "own.toml")


def test_a_module_hidden_by_an_installed_one_is_named(tmp_path, module):
    (tmp_path / "beside" / "colorsys.py").write_text(MODULE)
    with pytest.raises(SpecError, match=r"no function or class in colorsys \(.*colorsys\.py\) named 'load'"):
        load_spec(write(tmp_path, module, **{f"{module}:load": "colorsys:load"}))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_finds_modules_beside_the_spec(tmp_path, module):
    pytest.importorskip("ray")
    store = Store(tmp_path / "a.sqlite")
    report = run(load_spec(write(tmp_path, module)), store, executor="ray", processes=1)
    assert report.complete, report.failures
