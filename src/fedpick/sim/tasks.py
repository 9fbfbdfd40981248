"""Tasks: a model and its loss, and the settings that describe those of the papers.

A task of the user is a `Task` of three functions in JAX, or a PyTorch module; where a name is expected, it is
`package.module:function`, a function that returns one. The settings describe a model without any engine: importing
them imports neither JAX nor PyTorch, and `build` makes the task for data of some shape and an engine.

>>> from fedpick.sim import tasks
>>> "mlp" in tasks.names()
True
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, ClassVar, Literal, Protocol, get_args

from fedpick.core.errors import InvalidInput, unknown_name
from fedpick.core.imports import accepts, build_object, is_import_path, load_object
from fedpick.core.validation import assign, choice, is_whole, number, require
from fedpick.sim.engine import EngineMaker, Trainable
from fedpick.sim.jax_engine.setup import require_jax
from fedpick.sim.settings import EngineName
from fedpick.sim.torch_engine.setup import require_torch
from fedpick.sim.torch_engine.task import TorchTask, torch_task

__all__ = [
    "CnnCaFed",
    "CnnFedCor",
    "CnnMcMahanCifar",
    "CnnMcMahanFmnist",
    "CnnPowerOfChoice",
    "Convolutional",
    "Logistic",
    "Mlp",
    "Quadratic",
    "Sent140Mlp",
    "Task",
    "TaskSettings",
    "TorchTask",
    "UserTask",
    "as_task",
    "describe",
    "get",
    "names",
    "options_source",
    "settings",
]

Array = Any
Params = Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """A model and its loss in JAX. `x` is (B, ...) float32, normalised; `y` is (B,)."""

    name: str
    """The name in messages and reports."""
    init: Callable[[Array], Params]
    """key -> params: any tree (dicts, lists, tuples) of float32 arrays."""
    per_example_loss: Callable[[Params, Array, Array, Array, bool], Array]
    """(params, x, y, key, train) -> (B,). `key` is a JAX random key, for dropout; `train` is False when measuring."""
    correct: Callable[[Params, Array, Array], Array]
    """(params, x, y) -> (B,) bool: whether each prediction is right."""
    outputs: Callable[[Params, Array], Array] | None = None
    """(params, x) -> (B, s) raw outputs, for policies that compare models by what they answer on noise."""
    evaluation_batch: int = 8192
    """Examples per block when measuring: bounds the memory, never changes the answer."""
    group: int | None = None
    """Clients trained in one batched program; None: decided by the number of parameters."""

    @property
    def engine(self) -> EngineMaker:
        """Makes the engine that trains this task."""
        require_jax()
        from fedpick.sim.jax_engine.engine import JaxEngine

        return partial(JaxEngine, self)


class TaskSettings(Protocol):
    """The options of a task."""

    def build(self, input_shape: Sequence[int], num_classes: int, engine: EngineName | None = None) -> Trainable:
        """The task for examples of this shape and this number of classes."""
        ...


def _models(engine: EngineName) -> ModuleType:
    if engine == "torch":
        require_torch()
        from fedpick.sim.torch_engine import models as torch_models

        return torch_models
    require_jax()
    from fedpick.sim.jax_engine import models

    return models


@lru_cache(maxsize=64)
def _built(description: Any, input_shape: tuple[int, ...], num_classes: int, engine: EngineName) -> Trainable:
    """The same settings give the same task object, so all simulators of a process share its compiled programs."""
    task: Trainable = description.make(_models(engine), input_shape, num_classes)
    return task


class _Described:
    """What the settings of all tasks in this module share."""

    usual_shape: ClassVar[tuple[int, ...]] = ()
    usual_classes: ClassVar[int] = 10

    def build(
        self,
        input_shape: Sequence[int] | None = None,
        num_classes: int | None = None,
        engine: EngineName | None = None,
    ) -> Trainable:
        """The task for examples of this shape and this number of classes; default: those of the paper's data."""
        shape = self.usual_shape if input_shape is None else tuple(int(size) for size in input_shape)
        return _built(self, shape, self.usual_classes if num_classes is None else num_classes, engine or "jax")

    def make(self, models: Any, input_shape: tuple[int, ...], num_classes: int) -> Trainable:
        """Build the task with the models of an engine."""
        raise NotImplementedError


def _check_widths(settings: object, name: str) -> None:
    widths = tuple(getattr(settings, name))
    require(all(is_whole(width, 1) for width in widths), settings, name, "whole numbers of at least 1")
    assign(settings, **{name: widths})


@dataclass(frozen=True, kw_only=True)
class Mlp(_Described):
    """Perceptron of FedCor and Power-of-Choice, 784-64-30-10; dropout: none, fedcor or power-of-choice."""

    usual_shape = (28, 28, 1)

    hidden: tuple[int, ...] = (64, 30)
    dropout: Literal["none", "fedcor", "power-of-choice"] = "none"
    """"fedcor": before the ReLU of every hidden layer; "power-of-choice": after the second hidden layer only (their
    code; their text says the first)."""
    rate: float = 0.5

    def __post_init__(self) -> None:
        _check_widths(self, "hidden")
        choice(self, "dropout", ("none", "fedcor", "power-of-choice"))
        number(self, "rate", "[0, 1)")

    def make(self, models: Any, input_shape: tuple[int, ...], num_classes: int) -> Trainable:
        """See `_Described.make`."""
        dropped = {"none": (), "fedcor": range(len(self.hidden)), "power-of-choice": (1,)}[self.dropout]
        sizes = (math.prod(input_shape), *self.hidden, num_classes)
        task: Trainable = models.perceptron("mlp", sizes, dropped=frozenset(dropped), rate=self.rate)
        return task


@dataclass(frozen=True, kw_only=True)
class Sent140Mlp(_Described):
    """Perceptron on averaged GloVe vectors, 200-128-86-30-2 (Power-of-Choice)."""

    usual_shape = (200,)
    usual_classes = 2

    def make(self, models: Any, input_shape: tuple[int, ...], num_classes: int) -> Trainable:
        """See `_Described.make`."""
        task: Trainable = models.perceptron("sent140-mlp", (math.prod(input_shape), 128, 86, 30, num_classes))
        return task


@dataclass(frozen=True, kw_only=True)
class Logistic(_Described):
    """Multinomial logistic regression, with a ridge and a start at zero or with zero bias as options."""

    usual_shape = (60,)

    ridge: float = 0.0
    start: Literal["default", "zero", "zero-bias"] = "default"
    """"default" is PyTorch's initialisation."""

    def __post_init__(self) -> None:
        choice(self, "start", ("default", "zero", "zero-bias"))
        number(self, "ridge", "[0, inf)")

    def make(self, models: Any, input_shape: tuple[int, ...], num_classes: int) -> Trainable:
        """See `_Described.make`."""
        task: Trainable = models.logistic(math.prod(input_shape), num_classes, ridge=self.ridge, start=self.start)
        return task


@dataclass(frozen=True, kw_only=True)
class Convolutional(_Described):
    """Convolutions (each with ReLU, some with 2x2 max-pooling), then dense layers with ReLU between."""

    usual_shape = (32, 32, 3)
    name: ClassVar[str]
    kernel: ClassVar[int] = 5
    padding: ClassVar[int] = 0
    hidden: ClassVar[tuple[int, ...]] = ()

    filters: tuple[int, ...] = field(init=False)

    @property
    def pooled(self) -> tuple[bool, ...]:
        """Which convolutions are followed by max-pooling."""
        return (True,) * len(self.filters)

    def make(self, models: Any, input_shape: tuple[int, ...], num_classes: int) -> Trainable:
        """See `_Described.make`."""
        if len(input_shape) != 3:
            raise InvalidInput(
                f"{self.name} works on images of shape (height, width, channels). Got {input_shape}; choose the task "
                "mlp or logistic for flat data."
            )
        task: Trainable = models.convolutional(self, input_shape, num_classes)
        return task


@dataclass(frozen=True, kw_only=True)
class CnnFedCor(Convolutional):
    """Three 3x3 convolutions (32, 64, 64) and a hidden layer of 64 (FedCor, CIFAR-10)."""

    name = "cnn-fedcor"
    kernel = 3
    hidden = (64,)
    filters: tuple[int, ...] = field(default=(32, 64, 64), init=False)

    @property
    def pooled(self) -> tuple[bool, ...]:
        """Which convolutions are followed by max-pooling."""
        return (True, True, False)


@dataclass(frozen=True, kw_only=True)
class CnnMcMahanFmnist(Convolutional):
    """5x5 convolutions of 32 and 64, dense 512 (FedGS, Fashion-MNIST)."""

    usual_shape = (28, 28, 1)
    name = "cnn-mcmahan-fmnist"
    padding = 2
    hidden = (512,)
    filters: tuple[int, ...] = field(default=(32, 64), init=False)


@dataclass(frozen=True, kw_only=True)
class CnnMcMahanCifar(Convolutional):
    """5x5 convolutions of 64 and 64, dense 384-192 (FedGS, CIFAR-10)."""

    name = "cnn-mcmahan-cifar"
    hidden = (384, 192)
    filters: tuple[int, ...] = field(default=(64, 64), init=False)


@dataclass(frozen=True, kw_only=True)
class CnnCaFed(Convolutional):
    """Two 5x5 convolutions and one dense layer (CA-Fed, CIFAR-10).

    The paper gives neither widths nor kernel: 5x5 and `filters` are ours.
    """

    name = "cnn-cafed"
    filters: tuple[int, ...] = (32, 64)

    def __post_init__(self) -> None:
        _check_widths(self, "filters")


@dataclass(frozen=True, kw_only=True)
class CnnPowerOfChoice(Convolutional):
    """5x5 convolutions of 6 and 16, dense 120-100-84-50 (Power-of-Choice, CIFAR-10)."""

    name = "cnn-power-of-choice"
    hidden = (120, 100, 84, 50)
    filters: tuple[int, ...] = field(default=(6, 16), init=False)


@dataclass(frozen=True, kw_only=True)
class Quadratic(_Described):
    """Power-of-Choice's quadratic: w'Hw/2 - e.w + e'H^-1 e/2, one example (diagonal of H, e) per client."""

    usual_shape = (2, 5)
    usual_classes = 0

    start_scale: float = 100.0
    """The model w starts at start_scale * N(0, 1)."""

    def make(self, models: Any, input_shape: tuple[int, ...], num_classes: int) -> Trainable:
        """See `_Described.make`."""
        if len(input_shape) != 2 or input_shape[0] != 2:
            raise InvalidInput(f"The quadratic needs examples of shape (2, dimension). Got {input_shape}.")
        task: Trainable = models.quadratic(input_shape[1], start_scale=self.start_scale)
        return task


@dataclass(frozen=True, kw_only=True)
class UserTask:
    """A task of the user: the function behind `package.module:function` and its options."""

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(
        self,
        input_shape: Sequence[int] | None = None,
        num_classes: int | None = None,
        engine: EngineName | None = None,
    ) -> Trainable:
        """Call the function, with the shape and the number of classes if it takes them."""
        if engine is not None:
            raise InvalidInput(
                f"'engine' chooses for fedpick's own tasks. The task {self.target!r} brings its engine with it: leave "
                "'engine' out."
            )
        function = load_object("task", self.target)
        data = {"input_shape": input_shape, "num_classes": num_classes}
        given = {key: value for key, value in data.items() if value is not None and accepts(function, key)}
        options = {**self.options, **given}
        # As `_built`, for options that may not be hashable.
        key = (function, repr(sorted(options.items())))
        if key not in _USER_TASKS:
            made = build_object("task", self.target, function, object, options)
            ready = isinstance(made, (Task, TorchTask))
            if not ready and not callable(made):
                raise InvalidInput(
                    f"The task {self.target!r} must return a fedpick.sim.Task or a torch.nn.Module. "
                    f"Got {type(made).__name__}."
                )
            # A module is made again under the seed of every run.
            _USER_TASKS[key] = made if ready else torch_task(partial(function, **options), self.target)
        return _USER_TASKS[key]


_USER_TASKS: dict[tuple[Callable[..., Any], str], Trainable] = {}
_TASKS: dict[str, type[_Described]] = {
    "mlp": Mlp,
    "cnn-fedcor": CnnFedCor,
    "cnn-mcmahan-fmnist": CnnMcMahanFmnist,
    "cnn-mcmahan-cifar": CnnMcMahanCifar,
    "cnn-cafed": CnnCaFed,
    "cnn-power-of-choice": CnnPowerOfChoice,
    "logistic": Logistic,
    "sent140-mlp": Sent140Mlp,
    "quadratic": Quadratic,
}


def names() -> tuple[str, ...]:
    """The registered tasks."""
    return tuple(sorted(_TASKS))


def options_source(name: str) -> Any:
    """The dataclass behind a name, or the user's function: its fields or keyword arguments are the options."""
    if is_import_path(name):
        return load_object("task", name)
    if name not in _TASKS:
        hint = "run `fedpick list tasks` to see them; your own is named 'package.module:function'"
        raise unknown_name("task", name, _TASKS, hint)
    return _TASKS[name]


def describe(name: str) -> str:
    """One line about a task."""
    return (inspect.getdoc(options_source(name)) or "").partition("\n")[0]


def settings(name: str, **options: Any) -> TaskSettings:
    """The typed options of a task; nothing is built yet."""
    source = options_source(name)
    if unknown := sorted(option for option in options if not accepts(source, option)):
        known = ", ".join(inspect.signature(source).parameters) or "none"
        raise InvalidInput(f"The task {name!r} has the options {known}. Got {', '.join(unknown)}.")
    if is_import_path(name):
        return UserTask(target=name, options=options)
    built: TaskSettings = source(**options)
    return built


def get(
    name: str,
    *,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
    engine: EngineName | None = None,
    **options: Any,
) -> Any:
    """Build a task by name. `input_shape` and `num_classes` come from the data, the other options are the task's own.

    `package.module:function` is your own: the function is called with the options, and with those two if it takes them.
    `engine` chooses the library that trains one of fedpick's own tasks: "jax" (the default) or "torch".
    """
    if engine is not None:
        choice("tasks.get", "engine", get_args(EngineName), value=engine)
    description: Any = settings(name, **options)
    return description.build(input_shape, num_classes, engine)


def as_task(task: Any, *, input_shape: Sequence[int], num_classes: int, engine: EngineName | None = None) -> Trainable:
    """The task behind its name, a PyTorch module or a function that makes one; a task is returned as it is."""
    if isinstance(task, str):
        named: Trainable = get(task, input_shape=input_shape, num_classes=num_classes, engine=engine)
        return named
    if engine is not None:
        raise InvalidInput("'engine' chooses for tasks given by name. A task or a module brings its engine with it.")
    if isinstance(task, (Task, TorchTask)):
        return task
    if not callable(task):
        raise InvalidInput(
            "The task must be the name of one, a fedpick.sim.Task, a torch.nn.Module or a function that returns one. "
            f"Got {type(task).__name__}."
        )
    return torch_task(task)
