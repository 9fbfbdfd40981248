"""Make the published tables and figures again: one command for all of them, or for some.

    python -m benchmarks.reproduce --list                    # what there is, what it costs, of which commit it is
    python -m benchmarks.reproduce --only "ca-fed.md"        # everything whose page or part contains the text
    python -m benchmarks.reproduce --only "CIFAR-10, reduced"        # the reduced grids on CIFAR-10
    python -m benchmarks.reproduce --estimate --only fedgs   # measure some rounds of every policy on this machine

Stored rounds are not computed again, so the same command resumes. Pictures go to docs/figures or results/figures,
tables to the terminal; copy them into the pages. `reproduce.toml` lists the parts. Its minutes are processor time,
which two cores share.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedpick.core.errors import unknown_name
from fedpick.experiments.inheritance import experiment_names
from fedpick.experiments.run import build
from fedpick.experiments.spec import PolicySpec, Spec, load_spec

ROOT = Path(__file__).parents[1]
ROUNDS, LONGEST = 22, 60.0
"""What an estimate measures of every policy: rounds, or seconds if these are over first."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A table or figure, or several that the same commands make."""

    page: str
    """Below docs."""
    part: str
    """The heading on the page."""
    commands: tuple[str, ...]
    minutes: float
    """Processor time of all commands."""
    basis: str
    """Of the minutes: "measured" in full, "estimated" from the time of a round, or "guessed"."""
    commit: str
    """Of the published numbers."""
    needs: str = ""
    """A file that does not come with fedpick; without it the part is skipped."""

    def matches(self, text: str) -> bool:
        """Whether the page or the heading contains the text."""
        return text.lower() in f"{self.page} {self.part}".lower()


def parts() -> list[Part]:
    """All parts, in the order of the file."""
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    common = {"commit": listed["commit"]}
    return [Part(**{**common, **table, "commands": tuple(table["commands"])}) for table in listed["parts"]]


def arguments_of(command: str) -> list[str]:
    """The words of a command, with this Python in the place of `fedpick` and `python`."""
    first, *rest = shlex.split(command)
    return [sys.executable, "-m", "fedpick", *rest] if first == "fedpick" else [sys.executable, *rest]


def specs_of(command: str) -> Iterator[Spec]:
    """The experiments of a `fedpick run`, as its options change them; no experiment for other commands."""
    words = shlex.split(command)
    if words[:2] != ["fedpick", "run"]:
        return
    options = dict(zip(words[3::2], words[4::2], strict=True))
    for name in experiment_names(ROOT / words[2]):
        yield load_spec(name).override(
            seeds=int(options["--seeds"]) if "--seeds" in options else None,
            rounds=int(options["--rounds"]) if "--rounds" in options else None,
            only=options["--only"].split(",") if "--only" in options else None,
        )


def seconds_per_round(spec: Spec, policy: PolicySpec) -> tuple[float, float]:
    """Processor and clock seconds of a round, the mean after the first two, which compile."""
    run = build(spec.settings_of(policy, spec.seeds[0]))
    begin = time.perf_counter()
    marks = []
    for _ in run.rounds(min(ROUNDS, spec.rounds)):
        marks.append((time.process_time(), time.perf_counter()))
        if len(marks) > 3 and time.perf_counter() - begin > LONGEST:
            break
    (cpu, clock), (cpu_end, clock_end) = marks[1], marks[-1]
    return (cpu_end - cpu) / (len(marks) - 2), (clock_end - clock) / (len(marks) - 2)


def estimate(part: Part) -> None:
    """Print what the runs of a part cost on this machine."""
    total = 0.0
    for command in part.commands:
        for spec in specs_of(command):
            for policy in spec.policies:
                cpu, clock = seconds_per_round(spec, policy)
                minutes = cpu * spec.rounds * len(spec.seeds) / 60
                total += minutes
                print(
                    f"{spec.title}, {policy.label}: {cpu:.3f} s of processor time per round ({clock:.3f} s by the "
                    f"clock), {spec.rounds} rounds, {len(spec.seeds)} seeds: {minutes:.1f} min",
                    flush=True,
                )
    print(f"{part.page}, {part.part}: {total:.0f} min of processor time\n", flush=True)


def _spent() -> float:
    """Processor seconds of all programs that have ended, and of those that they started."""
    times = os.times()
    return times.children_user + times.children_system


def show(chosen: list[Part]) -> None:
    """Print the parts with their cost and commit."""
    for part in chosen:
        cost = f"{part.minutes:g} min of processor time, {part.basis}"
        print(f"{part.page}, {part.part}: {cost}, numbers of commit {part.commit}")
        for command in part.commands:
            print(f"    {command}")
    print(f"together {sum(part.minutes for part in chosen) / 60:.1f} hours of processor time")


def main(arguments: list[str] | None = None) -> None:
    """Run, show or estimate the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="parts whose page or heading contains this; repeatable")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--list", action="store_true", help="only show the parts and their commands")
    action.add_argument("--estimate", action="store_true", help="only measure some rounds of every policy")
    options = parser.parse_args(arguments)
    known = parts()
    chosen = [part for part in known if not options.only or any(part.matches(text) for text in options.only)]
    if not chosen:
        raise unknown_name("part", ", ".join(options.only), [f"{part.page} {part.part}" for part in known])
    if options.list:
        show(chosen)
        return
    for part in chosen:
        if part.needs and not (ROOT / part.needs).exists():
            print(f"== {part.page}, {part.part}: skipped, needs {part.needs} in {ROOT}", flush=True)
            continue
        if options.estimate:
            estimate(part)
            continue
        print(f"== {part.page}, {part.part}: about {part.minutes:g} min of processor time", flush=True)
        begin = _spent()
        for command in part.commands:
            print(f"-- {command}", flush=True)
            subprocess.run(arguments_of(command), cwd=ROOT, check=True)
        print(f"== took {(_spent() - begin) / 60:.1f} min of processor time", flush=True)


if __name__ == "__main__":
    main()
