"""Names of data sets, and the way from a name to the data.

`package.module:function` names a data set of one's own: a function that returns a `Dataset`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedpick.core.errors import InvalidInput, unknown_name
from fedpick.core.imports import accepts, build_object, is_import_path, load_object
from fedpick.data.images import CIFAR10, EMNIST_DIGITS, FMNIST, MNIST, cifar10, digits, emnist_digits, fmnist, mnist
from fedpick.data.sentiment import GLOVE, SENTIMENT140, sentiment140
from fedpick.data.sources import Collection, Progress, find_files
from fedpick.data.synthetic import leaf_synthetic, quadratic, synthetic
from fedpick.data.types import Dataset

__all__ = ["cite", "describe", "fetch", "load", "loader_of", "names"]

_LOADERS: dict[str, Callable[..., Dataset]] = {
    "cifar10": cifar10,
    "digits": digits,
    "emnist-digits": emnist_digits,
    "fmnist": fmnist,
    "leaf-synthetic": leaf_synthetic,
    "mnist": mnist,
    "quadratic": quadratic,
    "sentiment140": sentiment140,
    "synthetic": synthetic,
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
    return tuple(sorted(_LOADERS))


def loader_of(name: str) -> Callable[..., Dataset]:
    """The function behind a name; its keyword arguments are the options of the data set."""
    if is_import_path(name):
        return load_object("data set", name)
    if name not in _LOADERS:
        hint = "`fedpick list datasets` shows them all; your own is named 'package.module:function'"
        raise unknown_name("data set", name, _LOADERS, hint)
    return _LOADERS[name]


def describe(name: str) -> str:
    """One line about a data set."""
    return (inspect.getdoc(loader_of(name)) or "").partition("\n")[0]


def cite(name: str) -> str:
    """Whom to cite for a data set; nobody that fedpick knows of for your own."""
    loader_of(name)
    return _CITATIONS.get(name, "")


def load(name: str, **options: Any) -> Dataset:
    """A data set by name; files are searched, verified and, if need be, fetched (see `fedpick.data.sources`).

    `package.module:function` is your own: the function is called with the options and returns a `Dataset`.

    >>> from fedpick.data import load
    >>> load("synthetic", alpha=0.5, beta=0.5, num_clients=10, seed=1).num_classes
    10
    """
    loader = loader_of(name)
    for option in options:
        if not accepts(loader, option):
            known = ", ".join(inspect.signature(loader).parameters) or "none"
            raise InvalidInput(f"The data set {name!r} has no option {option!r}. It has {known}.")
    if is_import_path(name):
        dataset: Dataset = build_object("data set", name, loader, Dataset, options)
        return dataset
    return loader(**options)


def fetch(name: str, directory: str | Path | None = None, progress: Progress | None = None) -> list[Path]:
    """Verified files of a data set, fetched into `directory`/NAME (default: the cache) if they are nowhere yet.

    Data sets that are generated or come with a package have no files: the list is empty.
    """
    loader_of(name)
    paths: list[Path] = []
    for collection in _COLLECTIONS.get(name, ()):
        store = None if directory is None else Path(directory) / collection.name
        paths += find_files(collection, directory=directory, store=store, progress=progress).values()
    return paths
