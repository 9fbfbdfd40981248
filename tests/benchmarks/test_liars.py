from __future__ import annotations

import pytest

from benchmarks import liars, pages


def test_the_page_shows_the_rows_of_the_file():
    page = liars.PAGE.read_text()
    assert pages.fill(page, liars.tables(liars._rows(liars._FILE))) == page


@pytest.mark.parametrize(("attack", "captured"), [("absent", False), ("inflate", True)])
def test_a_run_counts_the_places_of_liars_and_of_those_who_would_lie(attack, captured):
    row = liars.one_run("adapow-d", {"attack": attack, "share": 0.2, "guard": "off"}, seed=0, rounds=3)
    assert (row["captured"] > 0.2) == captured
    assert 0 < row["accuracy"] < 1


@pytest.mark.filterwarnings("ignore:The guard bounds the sizes")
def test_the_sizes_that_clients_claim_are_bounded():
    lines = list(liars.sizes(rounds=5))
    assert lines[0].startswith("| policy | no guard")
    assert "100 %" in next(line for line in lines if line.startswith("| md"))


def test_the_smallest_clients_come_first():
    order = liars._by_size(0)
    sizes = liars._federation("digits-unequal", 0).sizes[order]
    assert (sizes[1:] >= sizes[:-1]).all()
    assert sizes[-1] > 5 * sizes[0]
