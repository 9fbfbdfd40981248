"""List the licences of everything that fedpick installs, with every extra, and check that they are compatible.

    python scripts/licences.py            # write LICENCES.md
    python scripts/licences.py --check    # fail on a licence that is unknown or incompatible, or a missing row

The licence is what the installed package says about itself. fedpick ships none of these packages: it names them as
dependencies, so licences that allow that, the weak copyleft ones included, are compatible with Apache-2.0.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

PAGE = Path(__file__).resolve().parents[1] / "LICENCES.md"
COMPATIBLE = {
    "0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "HPND", "ISC", "LGPL-3.0-only",
    "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
}  # fmt: skip
SPELLINGS = {
    r"apache.*2|apache software|^apache$": "Apache-2.0",
    r"3-clause|new bsd|modified bsd": "BSD-3-Clause",
    r"2-clause|simplified bsd": "BSD-2-Clause",
    r"lesser general.*v?3|lgpl.*3": "LGPL-3.0-only",
    r"mozilla.*2|mpl-?2": "MPL-2.0",
    r"python software foundation|^psf": "PSF-2.0",
    r"\bmit\b|^expat": "MIT",
    r"\bisc\b": "ISC",
    r"unlicense": "Unlicense",
    r"\bbsd\b": "BSD",
    r"public domain": "CC0-1.0",
}  # the first that matches


def installed(name: str, extras: frozenset[str], found: dict[str, metadata.Distribution]) -> None:
    """Add the installed dependencies of a package, and theirs, to `found`."""
    distribution = metadata.distribution(name)
    for text in distribution.requires or []:
        required = Requirement(text)
        wanted = any(required.marker is None or required.marker.evaluate({"extra": extra}) for extra in {"", *extras})
        key = re.sub(r"[-_.]+", "-", required.name).lower()
        if not wanted:
            continue
        if key == name:
            installed(name, frozenset(required.extras), found)
        elif key not in found or required.extras:
            try:
                found[key] = metadata.distribution(key)
            except metadata.PackageNotFoundError:
                continue  # an extra that is not installed here
            installed(key, frozenset(required.extras), found)


def licence(distribution: metadata.Distribution) -> str:
    """Return the licence of a package as an SPDX expression, or its own words."""
    about = distribution.metadata
    if expression := about.get("License-Expression"):
        return str(expression)
    classified = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or [] if "License ::" in line]
    for words in [*classified, (about.get("License") or "").splitlines()[0] if about.get("License") else ""]:
        for spelling, name in SPELLINGS.items():
            if re.search(spelling, words, re.IGNORECASE):
                return name
    return "; ".join(classified) or (about.get("License") or "unknown")[:60]


def compatible(expression: str) -> bool:
    """Whether every part that an SPDX expression demands is in the list; of alternatives, one."""
    return all(
        any(choice.strip(" ()").split(" WITH ")[0] in COMPATIBLE for choice in part.split(" OR "))
        for part in expression.split(" AND ")
    )


def main() -> None:
    """Write or check the list."""
    parser = argparse.ArgumentParser(description="List the licences of the dependencies.")
    parser.add_argument("--check", action="store_true", help="compare with LICENCES.md instead of writing it")
    options = parser.parse_args()
    found: dict[str, metadata.Distribution] = {}
    installed("fedpick", frozenset({"all", "torch"}), found)
    rows = {name: licence(distribution) for name, distribution in sorted(found.items())}
    wrong = [f"{name}: {words} is not in the list of compatible licences" for name, words in rows.items()
             if not compatible(words)]  # fmt: skip
    if options.check:
        listed = set(re.findall(r"^\| (\S+) \|", PAGE.read_text(), re.MULTILINE))
        wrong += [f"{name} is not in LICENCES.md: run {Path(__file__).name}" for name in rows if name not in listed]
    else:
        PAGE.write_text(
            "# Licences of the dependencies\n\nfedpick is under the Apache License 2.0. With every extra it installs "
            "the packages below. It ships none of them.\n`scripts/licences.py` writes this list from what the packages "
            "say about themselves; CI checks it.\n\n| package | licence |\n|---|---|\n"
            + "".join(f"| {name} | {words} |\n" for name, words in rows.items())
        )
    print("\n".join(wrong) or f"{len(rows)} dependencies, all with compatible licences.")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
