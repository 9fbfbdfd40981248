"""The API reference: one Markdown page per public module, written from docstrings when a build starts.

Public is what `__all__` names in fedpick and in the packages directly below it, and what `DEEPER` adds: the names that
the guides import from other modules. A public name, method or property without a docstring is an error; a field of a
record has its sentence below it, or in the docstring of its class.

Docstrings are Markdown here, not reStructuredText: no docstring can break the build by its punctuation.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from repository_pages import write_if_changed
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.logging import getLogger

import fedpick
from fedpick.core.errors import MissingDependency

LOG = getLogger(__name__)

INTERNAL = {"cli", "core"}
DEEPER: dict[str, tuple[str, ...]] = {
    "fedpick.core.errors": (),  # all of __all__
    "fedpick.core.sampling": (),
    "fedpick.core.state": ("Stateless", "derived", "per_client"),
    "fedpick.core.validation": ("choice", "flag", "number", "whole"),
    "fedpick.experiments.presets": ("comparison", "demo"),
    "fedpick.experiments.runner": ("Report", "run"),
    "fedpick.experiments.spec": ("load_spec",),
    "fedpick.experiments.store": ("Store", "open_store"),
    "fedpick.flower.legacy": ("server_of", "with_policy"),
    "fedpick.report.analysis": ("load_results",),
    "fedpick.report.tables": ("tables_of", "to_markdown"),
    "fedpick.sim.tasks": ("describe", "get", "names"),
    "fedpick.theory.ca_fed": (),
    "fedpick.theory.pow_d": (),
}
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):\n((?:    .*\n?|\n)+)", re.MULTILINE)
ITEM = re.compile(r"^    (\*{0,2}[\w, *]+): (.*(?:\n(?:     .*|$))*)", re.MULTILINE)
FIELDS = {"Args": "param", "Attributes": "ivar", "Raises": "raises"}


def public_names() -> dict[str, tuple[str, ...]]:
    """Return the names of every public module."""
    modules = {"fedpick": tuple(fedpick.__all__)}
    for found in pkgutil.iter_modules(fedpick.__path__, "fedpick."):
        if found.name.rpartition(".")[2] not in INTERNAL and not found.name.endswith("__main__"):
            try:
                names = getattr(importlib.import_module(found.name), "__all__", ())
            except MissingDependency as error:
                LOG.info("%s is left out: %s", found.name, error)
                continue
            if names:
                modules[found.name] = tuple(names)
    for name, names in DEEPER.items():
        modules[name] = names or tuple(importlib.import_module(name).__all__)
    return modules


class Pages:
    """Writes the pages, and collects what lacks documentation."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def page(self, name: str, names: tuple[str, ...]) -> str:
        """Return the Markdown of a module's page."""
        module = importlib.import_module(name)
        parts = [f"# `{name}`", _markdown(inspect.getdoc(module) or "", 4), f"```{{py:module}} {name}\n```"]
        for member in sorted(names, key=lambda member: (member.startswith("__"), member)):
            if member != "__version__":
                parts.append(self._member(module, member))
        return "\n\n".join(parts) + "\n"

    def _member(self, module: ModuleType, name: str) -> str:
        value = getattr(module, name)
        if inspect.ismodule(value):
            page = f"[`{value.__name__}`]({value.__name__}.md)" if value.__name__ in DEEPER else f"`{value.__name__}`"
            return f"The module {page}."
        if inspect.isclass(value):
            return self._class(value, name)
        if inspect.isroutine(value):
            return self._routine(value, name, f"{module.__name__}.{name}", "function", 4)
        comment = ModuleAnalyzer.for_module(module.__name__).find_attr_docs().get(("", name))
        return _directive("data", name, self._required(" ".join(comment or []), f"{module.__name__}.{name}"), 4)

    def _class(self, found: type, name: str) -> str:
        place = f"{found.__module__}.{found.__qualname__}"
        own = found.__doc__ if not (found.__doc__ or "").startswith(f"{found.__name__}(") else ""
        text = inspect.cleandoc(self._required(own, place))
        body = [_markdown(text, 6)]
        comments = {
            attribute: " ".join(lines)
            for (owner, attribute), lines in ModuleAnalyzer.for_module(found.__module__).find_attr_docs().items()
            if owner == found.__qualname__
        }
        attributes = list(_attributes(found))
        body += [_directive("attribute", name, comments[name], 4) for name in attributes if name in comments]
        for attribute, value in vars(found).items():
            if attribute.startswith("_") or attribute in attributes:
                continue
            if isinstance(value, property):
                sentence = self._required(inspect.getdoc(value), f"{place}.{attribute}")
                body.append(_directive("property", attribute, sentence, 4))
            elif isinstance(value, (classmethod, staticmethod)) or inspect.isfunction(value):
                bound = getattr(found, attribute)
                body.append(self._routine(bound, attribute, f"{place}.{attribute}", "method", 4))
        kind = "exception" if issubclass(found, BaseException) else "class"
        plain = issubclass(found, (BaseException, enum.Enum)) or inspect.isabstract(found)
        signature = name if plain else name + _signature(found)
        return _directive(kind, signature, "\n\n".join(body), 7)

    def _routine(self, found: Any, name: str, place: str, kind: str, fence: int) -> str:
        text = self._required(inspect.getdoc(found), place)
        return _directive(kind, name + _signature(found), _markdown(text, fence + 1), fence)

    def _required(self, text: str | None, place: str) -> str:
        if not (text or "").strip():
            self.missing.append(place)
        return text or ""


def _attributes(found: type) -> Iterator[str]:
    if issubclass(found, enum.Enum):
        yield from found.__members__
    elif dataclasses.is_dataclass(found):
        yield from (item.name for item in dataclasses.fields(found) if not item.name.startswith("_"))


def _signature(found: Any) -> str:
    signature = inspect.signature(found)
    shown = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    returned = inspect.Signature.empty if inspect.isclass(found) else signature.return_annotation
    signature = signature.replace(parameters=shown, return_annotation=returned)
    text = re.sub(r" at 0x[0-9a-f]+", "", str(signature)).replace("'", "")
    return re.sub(r"<(?:factory|function ([\w.<>]+))>", "...", text)


def _directive(kind: str, signature: str, body: str, fence: int) -> str:
    ticks = ":" * fence
    return f"{ticks}{{py:{kind}}} {signature}\n{body.strip()}\n{ticks}"


def _markdown(text: str, fence: int) -> str:
    """Return a docstring as Markdown: sections become fields, examples and drawings become code."""

    def fields(section: re.Match[str]) -> str:
        kind = FIELDS.get(section[1])
        if kind is None:
            return f":returns: {' '.join(section[2].split())}\n\n"
        lines = [
            f":{kind} {word.strip()}: {' '.join(item[2].split())}"
            for item in ITEM.finditer(section[2])
            for word in item[1].split(",")
        ]
        return "\n".join(lines) + "\n\n"

    text = SECTION.sub(fields, inspect.cleandoc(text))
    blocks = []
    for block in re.split(r"\n\n+(?!    )", text):
        if re.search(r"[├└│]", block):
            block = f"```text\n{block}\n```"
        else:
            block = re.sub(
                r"^( *)>>> .*(?:\n.+)*", lambda shown: f"```pycon\n{inspect.cleandoc(shown[0])}\n```", block, flags=re.M
            )
        blocks.append(block)
    return "\n\n".join(blocks)


def _write(app: Sphinx) -> None:
    folder, pages, written = app.srcdir / "api", Pages(), {"index"}
    modules = public_names()
    for name, names in modules.items():
        write_if_changed(folder / f"{name}.md", pages.page(name, names))
        written.add(name)
    lines = "\n".join(f"{name}" for name in modules)
    write_if_changed(
        folder / "index.md",
        "# API reference\n\nWritten from the docstrings. What is not on these pages is internal and may change.\n\n"
        f"```{{toctree}}\n:titlesonly:\n\n{lines}\n```\n",
    )
    for old in folder.glob("*.md"):
        if old.stem not in written:
            old.unlink()
    for place in pages.missing:
        LOG.warning("%s is public and has no documentation", place)  # `make docs` turns warnings into errors


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
