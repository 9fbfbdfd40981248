from __future__ import annotations

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("jax")


@pytest.mark.parametrize("what", ["policies", "datasets", "partitions", "availability", "tasks"])
def test_lists(fedpick, what):
    code, out, _ = fedpick("list", what, "--json")
    assert code == 0
    entries = json.loads(out)
    assert all(entry["name"] and entry["summary"] for entry in entries)
    code, out, _ = fedpick("list", what)
    assert all(entry["name"] in out for entry in entries)


def test_every_policy_has_a_citation(fedpick):
    _, out, _ = fedpick("list", "policies", "--json")
    assert all("(" in entry["citation"] for entry in json.loads(out))
    _, out, _ = fedpick("list", "policies", "--bibtex")
    assert out.count("@") >= 5


def test_pictures(fedpick, tmp_path):
    code, out, err = fedpick("data", "show", "digits", "--clients", "10", "-o", "a.png")
    assert code == 0, err
    assert "10 clients, 1438 examples" in out
    assert (tmp_path / "a.png").stat().st_size > 1000
    code, out, err = fedpick("availability", "show", "log-normal", "--set", "beta=0.3", "--rounds", "20", "-o", "b.png")
    assert code == 0, err
    assert "available on average" in out
    assert (tmp_path / "b.png").stat().st_size > 1000
    code, out, err = fedpick("availability", "show", "ideal", "-o", "deep/er/c.PDF")
    assert code == 0, err
    assert (tmp_path / "deep/er/c.PDF").read_bytes().startswith(b"%PDF")


def test_data_that_needs_no_files(fedpick):
    code, out, _ = fedpick("data", "get", "digits", "--quiet")
    assert code == 0
    assert "needs no files" in out


def test_policies_in_full_have_their_options_and_needs(fedpick):
    code, out, _ = fedpick("list", "policies", "-v")
    assert code == 0
    assert "num_candidates=None" in out and "needs: loss, trial" in out and "needs: nothing" in out
    (found,) = [each for each in json.loads(fedpick("list", "policies", "-v", "--json")[1]) if each["name"] == "afl"]
    assert found["options"]["alpha1"] == 0.75 and found["needs"] == ["outcome.loss"]


def test_check_shows_what_passed_and_what_failed(fedpick, monkeypatch):
    from fedpick import testing

    def impossible(policy):
        raise testing.PolicyCheckFailed("Uniform: it cannot fly.")

    monkeypatch.setattr(testing, "CHECKS", {"one_client": testing.one_client})
    code, out, err = fedpick("check", "uniform")
    assert code == 0
    assert err.split() == ["passed", "one", "client"]
    assert "1 checks passed" in out
    testing.CHECKS["can_fly"] = impossible
    code, _, err = fedpick("check", "uniform")
    assert code == 1
    assert [line.strip() for line in err.splitlines()] == [
        "passed  one client",
        "FAILED  can fly",
        "Uniform: it cannot fly.",
    ]


@pytest.mark.parametrize("wrong", ["beta", "=1", "a.=1"])
def test_options_are_keys_and_values(fedpick, wrong):
    code, _, err = fedpick("check", "uniform", "--set", wrong)
    assert code == 2
    assert err == f"error: --set must look like key=value, such as beta=0.3. Got {wrong!r}.\n"
