from __future__ import annotations

import io
import json
import math

import pytest

from fedpick.experiments.progress import JsonLines, Lines, LiveBars, RunLine

NAMES = ["a [/b] c", "[red]warm[/red]", "a :warning: b"]


@pytest.mark.parametrize("name", NAMES)
def test_names_in_bars_are_text_never_markup(name):
    pytest.importorskip("rich")
    from rich.console import Console

    shown = LiveBars(Console(file=io.StringIO(), width=200, force_terminal=False))
    with shown:
        shown.start([RunLine(1, name, 0, 4, 0), RunLine(2, "other", 0, 4, 0)])
        shown.update(1, 2, 0.5)
        shown.finish(1, "failed", f"why {name}")
    text = shown.console.file.getvalue()
    assert f"{name}, seed 0: why {name}" in text
    assert text.count(name) >= 3
    assert "all 2 runs" in text and "failed" in text and "[red]failed" not in text


def test_lines_say_names_as_they_are():
    stream = io.StringIO()
    lines = Lines(stream)
    lines.start([RunLine(1, NAMES[0], 0, 4, 0)])
    lines.finish(1, "done")
    assert f"{NAMES[0]}, seed 0: done" in stream.getvalue()


def test_rounds_that_are_computed_again_are_no_negative_speed():
    stream = io.StringIO()
    lines = Lines(stream, every=0.0)
    lines.start([RunLine(1, "a", 0, 20, 10)])
    lines.update(1, 8, None)
    assert stream.getvalue().splitlines()[-1] == "a, seed 0: 8/20 rounds, 0.0/s"


def test_json_lines_are_json_where_there_is_no_accuracy():
    stream = io.StringIO()
    lines = JsonLines(stream)
    lines.start([RunLine(1, "a", 0, 2, 0)])
    for done, accuracy in ((1, math.nan), (2, math.inf)):
        lines.update(1, done, accuracy)
    lines.finish(1, "done")

    def no_number(word):
        raise AssertionError(f"{word} is not JSON")

    events = [json.loads(line, parse_constant=no_number) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["start", "progress", "progress", "run"]
    assert [event["accuracy"] for event in events[1:3]] == [None, None]
    assert list(events[0]) == ["event", "runs"]


def test_lines_leave_out_an_accuracy_that_is_none():
    stream = io.StringIO()
    lines = Lines(stream, every=0.0)
    lines.start([RunLine(1, "a", 0, 2, 0)])
    lines.update(1, 0, math.nan)
    lines.update(1, 1, math.nan)
    said = stream.getvalue()
    assert "a, seed 0: 1/2 rounds" in said
    assert "nan" not in said and "inf" not in said
