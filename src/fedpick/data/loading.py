"""Data sets by name.

A data set is a frozen dataclass of its options with a method `load`; `load(name, **options)` builds and loads it.
`package.module:function` names a data set of the user: a function that returns a `Dataset`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedpick.core.errors import InvalidInput, unknown_name
from fedpick.core.imports import accepts, build_object, is_import_path, load_object
from fedpick.data.images import CIFAR10, EMNIST_DIGITS, FMNIST, MNIST, Cifar10, Digits, EmnistDigits, Fmnist, Mnist
from fedpick.data.sources import Collection, Progress, find_files
from fedpick.data.synthetic import LeafSynthetic, Quadratic, Synthetic
from fedpick.data.text import GLOVE, SENTIMENT140, Sentiment140
from fedpick.data.types import Dataset

__all__ = [
    "DataSettings",
    "UserData",
    "cite",
    "describe",
    "fetch",
    "load",
    "names",
    "options_source",
    "settings",
    "takes_seed",
]


class DataSettings(Protocol):
    """The options of a data set."""

    def load(self) -> Dataset:
        """Generate or read the data."""
        ...


@dataclass(frozen=True, kw_only=True)
class UserData:
    """A data set of the user: the function behind `package.module:function` and its options."""

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Dataset:
        """Call the function."""
        function = load_object("data set", self.target)
        dataset: Dataset = build_object("data set", self.target, function, Dataset, self.options)
        return dataset


_DATA_SETS: dict[str, type[Any]] = {
    "cifar10": Cifar10,
    "digits": Digits,
    "emnist-digits": EmnistDigits,
    "fmnist": Fmnist,
    "leaf-synthetic": LeafSynthetic,
    "mnist": Mnist,
    "quadratic": Quadratic,
    "sentiment140": Sentiment140,
    "synthetic": Synthetic,
}
_COLLECTIONS: dict[str, tuple[Collection, ...]] = {
    "cifar10": (CIFAR10,),
    "emnist-digits": (EMNIST_DIGITS,),
    "fmnist": (FMNIST,),
    "mnist": (MNIST,),
    "sentiment140": (SENTIMENT140, GLOVE),
}
_CITATIONS = {
    "cifar10": "Krizhevsky (2009), Learning multiple layers of features from tiny images",
    "digits": "Alpaydin and Kaynak (1998), Optical recognition of handwritten digits, UCI; copy of scikit-learn",
    "emnist-digits": "Cohen et al. (2017), EMNIST: extending MNIST to handwritten letters",
    "fmnist": "Xiao, Rasul and Vollgraf (2017), Fashion-MNIST: a novel image dataset",
    "leaf-synthetic": "Caldas et al. (2018), LEAF: a benchmark for federated settings",
    "mnist": "LeCun et al. (1998), Gradient-based learning applied to document recognition",
    "quadratic": "Cho, Wang and Joshi (2022), Towards understanding biased client selection in federated learning",
    "sentiment140": "Go, Bhayani and Huang (2009), Twitter sentiment classification using distant supervision; "
    "Pennington et al. (2014), GloVe: global vectors for word representation",
    "synthetic": "Li et al. (2020), Federated optimization in heterogeneous networks",
}


def names() -> tuple[str, ...]:
    """The names `load` knows."""
    return tuple(sorted(_DATA_SETS))


def options_source(name: str) -> Any:
    """The dataclass behind a name, or the user's function: its fields or keyword arguments are the options."""
    if is_import_path(name):
        return load_object("data set", name)
    if name not in _DATA_SETS:
        hint = "`fedpick list datasets` shows them all; your own is named 'package.module:function'"
        raise unknown_name("data set", name, _DATA_SETS, hint)
    return _DATA_SETS[name]


def describe(name: str) -> str:
    """One line about a data set."""
    return (inspect.getdoc(options_source(name)) or "").partition("\n")[0]


def cite(name: str) -> str:
    """The reference for a data set; empty for a data set of the user."""
    options_source(name)
    return _CITATIONS.get(name, "")


def settings(name: str, **options: Any) -> DataSettings:
    """The typed options of a data set; nothing is read or drawn yet."""
    source = options_source(name)
    known = list(inspect.signature(source).parameters)
    for option in options:
        if not accepts(source, option):
            raise InvalidInput(f"The data set {name!r} has no option {option!r}. It has {', '.join(known) or 'none'}.")
    if is_import_path(name):
        return UserData(target=name, options=options)
    built: DataSettings = source(**options)
    return built


def takes_seed(name: str) -> bool:
    """Whether the data set has an option `seed`, that is, is random."""
    source = options_source(name)
    return "seed" in inspect.signature(source).parameters


def load(name: str, **options: Any) -> Dataset:
    """Load a data set by name; files are searched, verified and downloaded if necessary (`fedpick.data.sources`).

    `package.module:function` is your own: the function is called with the options and returns a `Dataset`.

    >>> from fedpick.data import load
    >>> load("synthetic", alpha=0.5, beta=0.5, num_clients=10, seed=1).num_classes
    10
    """
    return settings(name, **options).load()


def fetch(name: str, directory: str | Path | None = None, progress: Progress | None = None) -> list[Path]:
    """Verified files of a data set, downloaded into `directory`/NAME (default: the cache) if not found anywhere.

    Data sets that are generated or come with a package have no files: the list is empty.
    """
    options_source(name)
    paths: list[Path] = []
    for collection in _COLLECTIONS.get(name, ()):
        store = None if directory is None else Path(directory) / collection.name
        paths += find_files(collection, directory=directory, store=store, progress=progress).values()
    return paths
