"""Tables of importance: what groups of clients should have had and got, and how far a run was from the target."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedpick.experiments.store_read import Reader
from fedpick.report import accounting
from fedpick.report.accounting import GroupAccount
from fedpick.report.analysis import PolicyResults, Quantity, Results
from fedpick.report.tables import Column, Table
from fedpick.theory.ca_fed import bias_bound_chi_square, bias_bound_total_variation

__all__ = ["distance_table", "group_table"]


def _stated(heading: str, digits: int = 1, scale: float = 100.0) -> Column:
    """A column whose quantities are not measures of one run's rounds."""
    return Column(heading, lambda run: None, digits, scale)


_COLUMNS = (
    _stated("clients", 0, 1.0),
    _stated("target %"),
    _stated("realised %"),
    _stated("left out while available, %"),
    _stated("wholly left out, %"),
)
_EXCLUDED_COLUMNS = (_stated("excluded, % of client-rounds"), _stated("wholly excluded, % of rounds"))


def group_table(
    store: Reader, results: Results, grouping: str, accounts: Mapping[int, GroupAccount] | None = None
) -> Table:
    """Importance that groups of clients should have had and got, and how often they were left out, per policy.

    `accounts`: of the runs, by id, where they are known already. The columns of what a policy reports itself to
    exclude, there or not, are only there where one does.
    """
    lines: list[tuple[str, tuple[Quantity, ...]]] = []
    owners, reported = [], False
    for policy in results.policies:
        mine = _accounts(store, policy, grouping, accounts)
        reported = reported or any(account.excluded for account in mine)
        for group in sorted({name for account in mine for name in account.sizes}):
            lines.append((f"{policy.label}: {group}", _line(mine, group)))
            owners.append(policy.label)
    note = (
        "Importance: share of all weight with which updates entered the model. Left out while available: of the rounds "
        "and clients of the group with the client available, those in which it was not chosen; wholly: of the rounds "
        "with somebody of the group available, those in which nobody of it was chosen."
    )
    if reported:
        note += " Excluded: as the policy decided, available or not."
    if missing := results.incomplete:
        note = f"{note} Not finished: {'; '.join(missing)}."
    columns = (*_COLUMNS, *(_EXCLUDED_COLUMNS if reported else ()))
    kept = tuple((label, quantities[: len(columns)]) for label, quantities in lines)
    title = f"Importance by {grouping}"
    return Table(title, columns, kept, note, corner="policy: group", policies=tuple(owners))


def distance_table(
    store: Reader, results: Results, grouping: str, accounts: Mapping[int, GroupAccount] | None = None
) -> Table:
    """How far realised importance is from the target, and what that may cost by CA-Fed's theorems."""
    columns = (
        _stated("total variation", 3, 1.0),
        _stated("bias bound, theorem 3", 3, 1.0),
        _stated("chi-square: bias bound, theorem 1", 3, 1.0),
    )
    lines = []
    for policy in results.policies:
        if mine := _accounts(store, policy, grouping, accounts):
            lines.append((policy.label, _distances(mine)))
    note = (
        "Between target and realised importance over all clients. The bounds are in units of kappa2 times the largest "
        "gap F_k - F_k*, which a run does not know: at its own optimum for theorem 3, at the wanted one for theorem 1. "
        "N/A: some client never entered the model, which makes the chi-square divergence infinite."
    )
    return Table("Distance from the target importance", columns, tuple(lines), note)


def _distances(accounts: list[GroupAccount]) -> tuple[Quantity, ...]:
    variations = [account.total_variation for account in accounts]
    squares = [account.chi_square for account in accounts]
    finite = [None if square is None or not np.isfinite(square) else square for square in squares]
    return (
        Quantity(tuple(variations)),
        Quantity(tuple(None if each is None else bias_bound_total_variation(each, 1.0, 1.0) for each in variations)),
        Quantity(tuple(None if each is None else bias_bound_chi_square(each, 1.0, 1.0) for each in finite)),
    )


def _accounts(
    store: Reader, policy: PolicyResults, grouping: str, known: Mapping[int, GroupAccount] | None
) -> list[GroupAccount]:
    """Of the runs that have begun."""
    begun = [each for each in policy.runs if len(each.rounds["round"])]
    if known is not None:
        return [known[each.run.id] for each in begun if each.run.id in known]
    return [accounting.group_accounts(store, each.run, grouping, limit=each.wanted) for each in begun]


def _line(accounts: list[GroupAccount], group: str) -> tuple[Quantity, ...]:
    # Groups follow each seed's own data: a seed in which a group has no clients has nothing to say about it.
    known = [account for account in accounts if group in account.sizes]
    left_out = [account.left_out[group] for account in known if group in account.left_out]
    excluded = [account.excluded[group] for account in known if group in account.excluded]
    return (
        Quantity(tuple(float(account.sizes[group]) for account in known)),
        Quantity(tuple(account.target[group] for account in known)),
        Quantity(tuple(account.realized.get(group) for account in known)),
        Quantity(tuple(some for some, _ in left_out)),
        Quantity(tuple(whole for _, whole in left_out)),
        Quantity(tuple(some for some, _ in excluded)),
        Quantity(tuple(whole for _, whole in excluded)),
    )
