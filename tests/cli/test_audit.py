from __future__ import annotations

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
