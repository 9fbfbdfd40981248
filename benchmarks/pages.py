"""Tables that a benchmark writes into a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["fill"]


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with every table in its place: between `<!-- name -->` and `<!-- end -->`."""
    for name, table in tables.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise SystemExit(f"The page has no place for the table: expected <!-- {name} --> and <!-- end -->.")
        page = before + mark + table + "\n" + end + after
    return page
