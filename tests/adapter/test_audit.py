"""The audit log: its chain, what breaks it, and what a kill leaves."""

from __future__ import annotations

import json
import logging
import multiprocessing
from types import MappingProxyType

import numpy as np
import pytest

from fedpick.adapter.audit import AuditLog, check
from fedpick.core.errors import InvalidInput, StateFileError

LOG = logging.getLogger("fedpick")


def written(path, lines=8):
    audit = AuditLog(path, LOG)
    for place in range(lines):
        kind = "outcome" if place % 2 else "choice"
        audit.write(
            kind, round=place, cohort=[f"name:{place}"], values=np.array([0.1, np.nan, np.inf]), text="ä\n\u2028"
        )
    return audit


def test_a_log_is_json_lines_and_continues(tmp_path):
    path = tmp_path / "audit.jsonl"
    first = written(path)
    last, lines = first.hash, first.lines
    del first
    assert (check(path).lines, check(path).rounds, check(path).hash) == (8, 4, last)
    second = AuditLog(path, LOG)
    assert (second.lines, second.hash) == (lines, last)
    second.write("choice", round=9)
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    assert [row["line"] for row in rows] == list(range(1, 10))
    assert rows[0]["values"] == [0.1, None, None] and rows[0]["text"] == "ä\n\u2028"
    assert path.stat().st_mode & 0o077 == 0


def test_a_log_has_one_writer(tmp_path):
    path = tmp_path / "audit.jsonl"
    held = AuditLog(path, LOG)
    with pytest.raises(StateFileError, match="Another process writes to the audit log"):
        AuditLog(path, LOG)
    held.write("choice", round=1)


def test_a_part_of_a_line_is_removed_with_a_warning(tmp_path, caplog):
    path = tmp_path / "audit.jsonl"
    written(path)
    content = path.read_bytes()
    whole = content[: content.rindex(b"\n", 0, -1) + 1]
    for cut in (1, 5, 80, len(content) - len(whole) - 1):
        path.write_bytes(content[:-cut])
        assert check(path).torn and not check(path).broken and "Line 8 is only partly written" in check(path).sentence
        AuditLog(path, LOG)
        assert path.read_bytes() == whole and not check(path).sentence
    assert caplog.text.count("line 8 is only partly written") == 4


def changed(lines: list[bytes], rng: np.random.Generator) -> tuple[list[bytes], int]:
    """Lines with one change, and the first of them that is affected."""
    place = int(rng.integers(len(lines) - 1))
    kind = int(rng.integers(6))
    new = list(lines)
    line = bytearray(lines[place])
    at = int(rng.integers(len(line) - 1))
    if kind == 0:
        line[at] ^= 1 << int(rng.integers(8))
        new[place] = bytes(line)
    elif kind == 1:
        new[place] = bytes(line[:at] + bytes([int(rng.integers(32, 127))]) + line[at:])
    elif kind == 2:
        new[place] = bytes(line[:at] + line[at + 1 :])
    elif kind == 3:
        del new[place]
    elif kind == 4:
        new.insert(place, lines[place])
        place += 1  # the copy that follows the original is the odd one
    else:
        new[place], new[place + 1] = new[place + 1], new[place]
    return new, place


def test_every_change_is_found_at_its_line(tmp_path):
    path = tmp_path / "audit.jsonl"
    written(path, lines=12)
    lines = path.read_bytes().splitlines(keepends=True)
    rng = np.random.Generator(np.random.PCG64(1))
    for _ in range(400):
        new, place = changed(lines, rng)
        path.write_bytes(b"".join(new))
        found = check(path)
        assert found.broken and found.lines == place, (found, place)
        with pytest.raises(StateFileError, match=f"Line {place + 1} is broken"):
            AuditLog(path, LOG)
        assert path.read_bytes() == b"".join(new)  # evidence


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"\xff\x00" * 100, b'{"hash": "' + b"0" * 64 + b'", }\n'])
def test_other_files_are_no_logs(tmp_path, content):
    path = tmp_path / "other"
    path.write_bytes(content)
    found = check(path)
    assert found.lines == 0 and (found.broken or found.torn or not content)


def test_bad_paths_are_named(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "audit.jsonl", tmp_path / "a\0b"):
        with pytest.raises(InvalidInput, match="audit must be the path of a file that can be written"):
            AuditLog(path, LOG)
    with pytest.raises(InvalidInput, match="cannot be read"):
        check(tmp_path / "none")


def write_for_ever(path):
    audit = AuditLog(path, LOG)
    while True:
        audit.write("choice", cohort=["x" * 5000])


def test_a_killed_writer_leaves_a_log_that_continues(tmp_path):
    path = tmp_path / "audit.jsonl"
    process = multiprocessing.get_context("spawn").Process(target=write_for_ever, args=(path,), daemon=True)
    process.start()
    while not path.exists() or path.stat().st_size < 20_000:
        process.join(0.01)
        assert process.is_alive()
    process.kill()
    process.join()
    AuditLog(path, LOG).write("resumed")
    assert not check(path).sentence and check(path).lines > 3


def test_mappings_of_any_kind_are_objects(tmp_path):
    audit = AuditLog(tmp_path / "audit.jsonl", LOG)
    audit.write("choice", diagnostics=MappingProxyType({"tier": 2, "inner": MappingProxyType({"x": np.float32(0.5)})}))
    (row,) = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert row["diagnostics"] == {"tier": 2, "inner": {"x": 0.5}}
