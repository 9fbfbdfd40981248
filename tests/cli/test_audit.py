from __future__ import annotations

import hashlib
import logging

import pytest

pytest.importorskip("typer")

from fedpick.adapter.audit import AuditLog


def test_audit_checks_the_chain_and_names_the_first_broken_line(fedpick, tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl", logging.getLogger("fedpick"))
    for round in range(4):
        log.write("choice", round=round)
        log.write("outcome", round=round)
    code, out, err = fedpick("audit", "audit.jsonl")
    assert (code, err) == (0, "")
    assert out == f"audit.jsonl: 8 lines, 4 rounds. The chain is unbroken; its last hash is {log.hash}.\n"
    text = (tmp_path / "audit.jsonl").read_text()
    (tmp_path / "audit.jsonl").write_text(text.replace('"round": 2', '"round": 3', 1))
    code, out, err = fedpick("audit", "audit.jsonl")
    assert (code, err) == (1, "")
    assert out.startswith("audit.jsonl: Line 5 is broken")
    code, _, err = fedpick("audit", "missing.jsonl")
    assert code == 2 and "cannot be read" in err


def test_audit_accepts_a_log_of_an_older_version(fedpick, tmp_path):
    """Its diagnostics are text, and its outcomes do not say what the guard did."""
    lines = [
        '{"hash": "HASH0", "line": 1, "at": "2026-01-31T12:00:00Z", "kind": "choice", "round": 1, '
        '"diagnostics": "mappingproxy({})"}',
        '{"hash": "HASH1", "line": 2, "at": "2026-01-31T12:00:09Z", "kind": "outcome", "round": 1, '
        '"completed": [true], "reports": {}}',
    ]
    last = "0" * 64
    for place, line in enumerate(lines):
        body = line.replace(f'"hash": "HASH{place}", ', "")
        last = hashlib.sha256((last + body).encode()).hexdigest()
        lines[place] = line.replace(f"HASH{place}", last)
    (tmp_path / "audit.jsonl").write_text("\n".join(lines) + "\n")
    code, out, err = fedpick("audit", "audit.jsonl")
    assert (code, err) == (0, "")
    assert out == f"audit.jsonl: 2 lines, 1 rounds. The chain is unbroken; its last hash is {last}.\n"
    AuditLog(tmp_path / "audit.jsonl", logging.getLogger("fedpick")).write("outcome", round=2, refused=["name:a"])
    assert fedpick("audit", "audit.jsonl")[0] == 0
