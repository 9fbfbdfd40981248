"""The tables of an experiment, for the terminal, Markdown, CSV and LaTeX.

A cell is the mean over the seeds ± their sample standard deviation; N/A: some seed has no value, as in the papers.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from typing import Any, ClassVar

import numpy as np

from fedpick.core.errors import InvalidInput
from fedpick.experiments.encoding import cell_text
from fedpick.experiments.tuning import Choice
from fedpick.report import analysis, lies
from fedpick.report.analysis import Difference, PolicyResults, Quantity, Results, RunMeasure, RunResults
from fedpick.report.fairness import PARTS, Fairness, jain_index
from fedpick.report.groups import GroupAccount
from fedpick.theory.ca_fed import bias_bound_chi_square, bias_bound_total_variation

__all__ = [
    "CLOCK_TITLE",
    "CREDIBILITY_TITLE",
    "FORMATS",
    "NOT_REACHED",
    "TIME_TITLE",
    "Column",
    "DifferenceColumn",
    "Table",
    "clock_unit",
    "credibility_table",
    "difference_columns",
    "difference_table",
    "distance_table",
    "fairness_table",
    "group_table",
    "render",
    "search_table",
    "tables_of",
    "to_csv",
    "to_html",
    "to_latex",
    "to_markdown",
    "to_rich",
]

NOT_REACHED = "N/A"
CLOCK_TITLE = "Time on the clients' devices (virtual clock)"
_CLOCK_NOTE = (
    "Questions before a choice take time too. Work thrown away: share of the chosen clients' time whose update did not "
    "enter the model."
)
CREDIBILITY_TITLE = "Who lost credibility, and when"
_LISTED_CLIENTS = 20
TIME_TITLE = "Computing time per round (mean over the second half)"


@dataclass(frozen=True)
class Column:
    """One measure: heading, value per run, format, and whether low or high is better."""

    heading: str
    measure: RunMeasure
    digits: int = 1
    scale: float = 1.0
    best: str = ""
    """"low", "high" or "" (neither is better)."""

    parts: ClassVar[tuple[str, ...]] = ("mean", "sd")
    """The numbers that a CSV file holds of every measure, beside the number of seeds."""

    def numbers(self, quantity: Quantity) -> list[float | None]:
        """The `parts`, scaled."""
        return [None if value is None else value * self.scale for value in (quantity.mean, quantity.sd)]

    def text(self, quantity: Quantity) -> str:
        """A cell."""
        if quantity.mean is None:
            return NOT_REACHED if quantity.values else ""
        mean = f"{quantity.mean * self.scale:.{self.digits}f}"
        return mean if quantity.sd is None else f"{mean} ± {quantity.sd * self.scale:.{self.digits}f}"


@dataclass(frozen=True)
class DifferenceColumn(Column):
    """A paired difference and its confidence interval: +1.56 [+0.40, +2.72]."""

    parts: ClassVar[tuple[str, ...]] = ("mean", "sd", "low", "high")

    def numbers(self, quantity: Quantity) -> list[float | None]:
        """The `parts`, scaled."""
        interval = quantity.interval if isinstance(quantity, Difference) else None
        ends = [None, None] if interval is None else [end * self.scale for end in interval]
        return [*super().numbers(quantity), *ends]

    def text(self, quantity: Quantity) -> str:
        """A cell."""
        if quantity.mean is None:
            return NOT_REACHED if quantity.values else ""
        mean, _, low, high = (
            None if value is None else f"{value:+.{self.digits}f}" for value in self.numbers(quantity)
        )
        return f"{mean}" if low is None else f"{mean} [{low}, {high}]"


@dataclass(frozen=True)
class Table:
    """A finished table, usually with one line per policy."""

    title: str
    columns: tuple[Column, ...]
    lines: tuple[tuple[str, tuple[Quantity, ...]], ...]
    """(label, a quantity per column)."""
    note: str = ""
    corner: str = "policy"
    """Heading of the labels."""
    policies: tuple[str, ...] = ()
    """The policy of each line, if the labels are not the policies'."""
    marks: tuple[str, ...] = ()
    """The line to mark in each column, if it is not for `best` to find."""

    def cells(self) -> list[list[str]]:
        """The texts of every line, label first."""
        return [
            [label, *(column.text(quantity) for column, quantity in zip(self.columns, quantities, strict=True))]
            for label, quantities in self.lines
        ]

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return to_html(self)

    def best(self) -> list[str | None]:
        """The line of each column that is better than every other by a paired 95 % interval; None: a tie."""
        if self.marks:
            return list(self.marks)
        winners: list[str | None] = []
        for position, column in enumerate(self.columns):
            quantities = {label: line[position] for label, line in self.lines}
            leading = analysis.leaders(quantities, column.best) if column.best else []
            winners.append(leading[0] if len(leading) == 1 else None)
        return winners


def _accuracy_columns(results: Results, window: int) -> list[Column]:
    if window < 1:
        raise InvalidInput(f"The window, a number of evaluations, must be at least 1. Got {window}.")
    columns = []
    for target in results.experiment.targets:
        heading = f"rounds to {100 * target:g} %"
        columns.append(Column(heading, partial(analysis.rounds_to_target, target=target), best="low"))
        if window > 1:
            smooth = partial(analysis.rounds_to_target, target=target, window=window)
            columns.append(Column(f"{heading}, mean of {window}", smooth, best="low"))
    for target in results.experiment.loss_targets:
        reach = partial(analysis.rounds_to_loss, target=target)
        columns.append(Column(f"rounds to loss {target:g}", reach, best="low"))
    columns.append(Column("final accuracy %", analysis.final_accuracy, 2, 100.0, "high"))
    if window > 1:
        mean = partial(analysis.final_accuracy, window=window)
        columns.append(Column(f"mean of last {window} %", mean, 2, 100.0, "high"))
    columns.append(Column("best accuracy %", analysis.best_accuracy, 2, 100.0, "high"))
    columns.append(Column("lowest test loss", analysis.lowest_loss, 4, best="low"))
    return columns


def _cost_columns(results: Results) -> list[Column]:
    columns = []
    for target in results.experiment.targets:
        models = partial(analysis.models_to_target, target=target)
        sent = partial(analysis.bytes_to_target, target=target)
        columns.append(Column(f"models to {100 * target:g} %", models, best="low"))
        columns.append(Column(f"MB to {100 * target:g} %", sent, 2, 1e-6, "low"))
    columns.append(Column("variance of selection counts", analysis.selection_variance, 2))
    return columns


def clock_unit(results: Results) -> tuple[str, float]:
    """The unit in which times on the virtual clock are shown, and how many of it a second is."""
    clocks = [run.clock for each in results.policies for run in each.runs]
    longest = max((float(np.nanmax(clock)) for clock in clocks if np.isfinite(clock).any()), default=0.0)
    return ("hours", 1 / 3600) if longest > 10 * 3600 else ("minutes", 1 / 60) if longest > 600 else ("seconds", 1.0)


def _has_clock(results: Results) -> bool:
    clocks = [run.clock for each in results.policies for run in each.runs]
    return any(len(clock) > 0 and math.isfinite(clock[-1]) for clock in clocks)


def _clock_columns(results: Results) -> list[Column]:
    unit, scale = clock_unit(results)
    columns = []
    for target in results.experiment.targets:
        reach = partial(analysis.seconds_to_target, target=target)
        columns.append(Column(f"{unit} to {100 * target:g} %", reach, 2, scale, "low"))
    columns.append(Column("seconds per round", analysis.virtual_seconds_per_round, 2))
    columns.append(Column("work thrown away %", analysis.thrown_away, 1, 100.0))
    return columns


_LIES_NOTE = (
    "Fair share: the liars' share of the clients. Distrusted: the guard's credibility fell below 1/2 at least once; of "
    "honest clients that is a false alarm. N/A: the guard is off, or less than half of the liars were distrusted."
)


def _lie_columns() -> list[Column]:
    return [
        Column("places of liars %", lies.captured, 1, 100.0, "low"),
        Column("over fair share", lies.over_fair, 2, 1.0, "low"),
        Column("liars distrusted %", lies.found, 1, 100.0, "high"),
        Column("half of them by round", lies.found_by, 0, 1.0, "low"),
        Column("false alarms %", lies.false_alarms, 1, 100.0, "low"),
    ]


def credibility_table(results: Results, most: int | None = _LISTED_CLIENTS) -> Table:
    """The clients that lost credibility with the guard: a line each, at most about `most` (None: all).

    The policies share the lines evenly; each shows the first clients of its first seeds.
    """
    columns = (
        _stated("lost in round", 0, 1.0),
        _stated("regained in round", 0, 1.0),
        _stated("times lost", 0, 1.0),
    )
    each = None if most is None else max(most // max(len(results.policies), 1), 1)
    lines, owners, count = [], [], 0
    for policy in results.policies:
        doubts = [(run.run.seed, doubt) for run in policy.runs for doubt in lies.doubts_of(run)]
        count += len(doubts)
        for seed, doubt in doubts[:each]:
            mark = " (liar)" if doubt.liar else ""
            numbers = (doubt.lost_in, doubt.regained_in, doubt.times)
            cells = tuple(Quantity(() if number is None else (float(number),)) for number in numbers)
            lines.append((f"{policy.label}, seed {seed}: client {doubt.client}{mark}", cells))
            owners.append(policy.label)
    note = "Lost: the guard's credibility fell below 1/2; regained: it rose above 1/2 again. The first time of each."
    if any(lies.liars_of(run) is not None for policy in results.policies for run in policy.runs):
        note += " A client that is not marked as a liar is a false alarm."
    if count > len(lines):
        note += f" {count - len(lines):,} of {count:,} such clients are not shown."
    return Table(CREDIBILITY_TITLE, columns, tuple(lines), note, corner="policy, seed: client", policies=tuple(owners))


def _time_columns() -> list[Column]:
    return [Column(f"{part} ms", partial(analysis.seconds_per_round, part=part), 2, 1e3) for part in analysis.PARTS]


def _table(title: str, columns: list[Column], policies: tuple[PolicyResults, ...], note: str = "") -> Table:
    lines = tuple(
        (policy.label, tuple(analysis.over_seeds(policy, column.measure) for column in columns)) for policy in policies
    )
    return Table(title, tuple(columns), lines, note)


def _with_missing(note: str, results: Results) -> str:
    missing = results.incomplete
    return f"{note} Not finished: {'; '.join(missing)}.".strip() if missing else note


def tables_of(results: Results, window: int = 1, *, most_clients: int | None = _LISTED_CLIENTS) -> list[Table]:
    """Accuracy, cost and time; where clients lie or lost credibility, what that did.

    `window` adds columns for the mean over that many evaluations. `most_clients` limits the lines of the table of
    clients that lost credibility; None: all.
    """
    seeds = max((len(policy.runs) for policy in results.policies), default=0)
    note = (
        f"Mean ± standard deviation over {seeds} seeds. Bold: better than every other policy by a paired 95 % "
        "interval; a column without bold is a tie. N/A: some seed never reached the target."
    )
    note = _with_missing(note if seeds > 1 else "One seed shows no differences: nothing is marked.", results)
    made = [
        _table(f"{results.experiment.title}: accuracy", _accuracy_columns(results, window), results.policies, note),
        *([_table(CLOCK_TITLE, _clock_columns(results), results.policies, _CLOCK_NOTE)] if _has_clock(results) else []),
        _table("Cost and fairness", _cost_columns(results), results.policies),
        _table(TIME_TITLE, _time_columns(), results.policies),
    ]
    if any(lies.liars_of(run) is not None for policy in results.policies for run in policy.runs):
        made.insert(1, _table("Clients that lie", _lie_columns(), results.policies, _LIES_NOTE))
    doubted = credibility_table(results, most_clients)
    if doubted.lines:
        made.insert(-1, doubted)
    return [table for table in (_measured(each, results) for each in made) if table.columns]


def _measured(table: Table, results: Results) -> Table:
    """Without the columns that a recorded training loop did not measure. A simulation measures all of them."""
    return _non_empty(table) if results.experiment.recorded else table


def _non_empty(table: Table) -> Table:
    """Without the columns in which no policy has a value."""
    kept = [place for place in range(len(table.columns)) if any(line[place].known for _, line in table.lines)]
    lines = tuple((label, tuple(line[place] for place in kept)) for label, line in table.lines)
    return replace(table, columns=tuple(table.columns[place] for place in kept), lines=lines)


def difference_columns(results: Results, window: int = 1) -> tuple[DifferenceColumn, ...]:
    """The measures in which policies are compared pair by pair."""
    wanted = [column for column in _accuracy_columns(results, window) if not column.heading.startswith("best")]
    wanted += [column for column in _clock_columns(results) if column.best] if _has_clock(results) else []
    return tuple(DifferenceColumn(each.heading, each.measure, each.digits, each.scale, each.best) for each in wanted)


def difference_table(results: Results, against: str, window: int = 1) -> Table:
    """Every other policy minus the one called `against`, paired by seed, with 95 % confidence intervals."""
    baseline = analysis.policy_named(results, against)
    # Every line is compared with the baseline, not with the others: mark no best one.
    columns = tuple(replace(column, best="") for column in difference_columns(results, window))
    lines = tuple(
        (policy.label, tuple(analysis.paired_difference(policy, baseline, column.measure) for column in columns))
        for policy in results.policies
        if policy is not baseline
    )
    pairs = sorted({len(quantities[0].values) for _, quantities in lines})
    note = (
        f"Each policy minus {baseline.label}, seed by seed (pairs: {' or '.join(map(str, pairs)) or 0}): mean and 95 % "
        "confidence interval (Student's t). N/A: some seed of either never reached the target."
    )
    made = Table(f"Paired differences to {baseline.label}", columns, lines, _with_missing(note, results))
    return _measured(made, results)


def search_table(title: str, choices: Sequence[Choice], note: str) -> Table:
    """A search for settings: one line per candidate, one column per policy, the chosen candidate marked.

    A cell is empty where a policy has no such hyper-parameter.
    """
    columns = tuple(_stated(choice.label, 4, 1.0) for choice in choices)
    scores = [{str(candidate): Quantity((score,)) for candidate, score in choice.scores} for choice in choices]
    names = list(dict.fromkeys(name for own in scores for name in own))
    lines = tuple((name, tuple(own.get(name, Quantity()) for own in scores)) for name in names)
    marks = tuple(str(choice.best) for choice in choices)
    rates = not any(choice.best.others for choice in choices)
    return Table(title, columns, lines, note, corner="learning rates" if rates else "settings", marks=marks)


# What the clients get


def fairness_table(results: Results, fairness: Mapping[int, Fairness]) -> Table:
    """How good the final model is for its clients, per policy; `fairness` is that of `fairness.fairness_of`."""

    def of(value: Callable[[Fairness], float | None]) -> RunMeasure:
        return lambda run: value(fairness[run.run.id]) if run.run.id in fairness else None

    def group(by: str, name: str) -> RunMeasure:
        return of(lambda each: each.groups.get(by, {}).get(name))

    def lowest_label(each: Fairness) -> float | None:
        return min(each.groups["label"].values()) if each.groups.get("label") else None

    def selection(run: RunResults) -> float | None:
        return jain_index(run.counts)

    columns = [
        Column("mean of clients %", of(lambda each: each.mean), 1, 100.0, "high"),
        Column("worst tenth %", of(lambda each: each.worst_tenth), 1, 100.0, "high"),
        Column("fewest examples %", group("size", "fewest examples"), 1, 100.0, "high"),
        Column("less often available %", group("availability", "less often available"), 1, 100.0, "high"),
        Column("lowest main label %", of(lowest_label), 1, 100.0, "high"),
        Column("Jain's index: accuracy", of(lambda each: each.jain), 3, best="high"),
        Column("Jain's index: selection", selection, 3, best="high"),
    ]
    measured = " or ".join(sorted({PARTS[each.part] for each in fairness.values()}))
    shown = {by for each in fairness.values() for by in each.groups}
    groups = {
        "size": "Fewest examples: the third of the clients with the fewest. ",
        "availability": "Less often available: that half of the clients. ",
        "label": "Lowest main label: the lowest mean over the clients that have most of one label. ",
    }
    note = (
        f"Accuracy of the final model for each client, on {measured}; clients count alike. "
        + "".join(words for by, words in groups.items() if by in shown)
        + "Jain's index is 1 if all clients are equal."
    )
    return _non_empty(_table("Accuracy for the clients", columns, results.policies, _with_missing(note, results)))


# Groups of clients


def _stated(heading: str, digits: int = 1, scale: float = 100.0) -> Column:
    """A column whose quantities are given, not measured on each run."""
    return Column(heading, lambda run: None, digits, scale)


_GROUP_COLUMNS = (
    _stated("clients", 0, 1.0),
    _stated("target %"),
    _stated("realised %"),
    _stated("left out while available, %"),
    _stated("wholly left out, %"),
)
_EXCLUDED_COLUMNS = (_stated("excluded, % of client-rounds"), _stated("wholly excluded, % of rounds"))


def group_table(results: Results, accounts: Mapping[int, GroupAccount]) -> Table:
    """Target and realised importance of every group, and how often it was left out, per policy.

    `accounts` are those of `groups.accounts_of`. The columns "excluded" appear if a policy reports exclusions.
    """
    reported = any(account.excluded for account in accounts.values())
    columns = (*_GROUP_COLUMNS, *(_EXCLUDED_COLUMNS if reported else ()))
    lines, owners = [], []
    for policy in results.policies:
        mine = _accounts(policy, accounts)
        for group in sorted({name for account in mine for name in account.target}):
            lines.append((f"{policy.label}: {group}", _group_line(mine, group)[: len(columns)]))
            owners.append(policy.label)
    note = (
        "Importance: share of all weight with which updates entered the model. Left out while available: of the rounds "
        "and clients of the group with the client available, those in which it was not chosen; wholly: of the rounds "
        "with at least one client of the group available, those in which none of them was chosen."
    )
    if reported:
        note += " Excluded: as the policy decided, available or not."
    by = next((account.groups.by for account in accounts.values()), "group")
    note = _with_missing(note, results)
    return Table(f"Importance by {by}", columns, tuple(lines), note, corner="policy: group", policies=tuple(owners))


def _accounts(policy: PolicyResults, accounts: Mapping[int, GroupAccount]) -> list[GroupAccount]:
    return [accounts[each.run.id] for each in policy.runs if each.run.id in accounts]


def _group_line(accounts: list[GroupAccount], group: str) -> tuple[Quantity, ...]:
    # Groups follow the data of each seed: a seed in which a group has no clients does not count.
    known = [account for account in accounts if group in account.target]
    sizes = [float(account.groups.sizes[account.groups.names.index(group)]) for account in known]
    left_out = [account.left_out[group] for account in known if group in account.left_out]
    excluded = [account.excluded[group] for account in known if group in account.excluded]
    return (
        Quantity(tuple(sizes)),
        Quantity(tuple(account.target[group] for account in known)),
        Quantity(tuple(account.realized.get(group) for account in known)),
        *(Quantity(tuple(pair[place] for pair in pairs)) for pairs in (left_out, excluded) for place in (0, 1)),
    )


def distance_table(results: Results, accounts: Mapping[int, GroupAccount]) -> Table:
    """Distance of realised importance from the target, and the bounds of CA-Fed's theorems on its cost."""
    columns = (
        _stated("total variation", 3, 1.0),
        _stated("bias bound, theorem 3", 3, 1.0),
        _stated("chi-square: bias bound, theorem 1", 3, 1.0),
    )
    lines = []
    for policy in results.policies:
        if mine := _accounts(policy, accounts):
            far = [account.total_variation for account in mine]
            squares = [account.chi_square for account in mine]
            finite = [None if each is None or not math.isfinite(each) else each for each in squares]
            variation_bounds = [None if each is None else bias_bound_total_variation(each, 1.0, 1.0) for each in far]
            square_bounds = [None if each is None else bias_bound_chi_square(each, 1.0, 1.0) for each in finite]
            quantities = tuple(Quantity(tuple(values)) for values in (far, variation_bounds, square_bounds))
            lines.append((policy.label, quantities))
    note = (
        "Between target and realised importance over all clients. The bounds are in units of kappa2 times the largest "
        "gap F_k - F_k*, which a run does not know: at the biased optimum for theorem 3, at the wanted one for "
        "theorem 1. N/A: some client never entered the model, which makes the chi-square divergence infinite."
    )
    return Table("Distance from the target importance", columns, tuple(lines), note)


# Output


def to_markdown(table: Table) -> str:
    """A pipe table, the winner of a column in bold."""
    winners = table.best()

    def mark(cells: list[str]) -> list[str]:
        label, *values = cells
        texts = [_markdown(text) for text in values]
        return [_markdown(label), *(f"**{text}**" if winners[i] == label else text for i, text in enumerate(texts))]

    head = [_markdown(text) for text in (table.corner, *(column.heading for column in table.columns))]
    lines = [f"**{_markdown(table.title)}**", "", _pipes(head), _pipes(["---", *("---:" for _ in table.columns)])]
    lines += [_pipes(mark(cells)) for cells in table.cells()]
    if table.note:
        lines += ["", _markdown(table.note)]
    return "\n".join(lines) + "\n"


def to_html(table: Table) -> str:
    """A plain table for notebooks, the winner of a column in bold. The report has its own, with colours."""
    winners = table.best()
    head = "".join(f"<th>{escape(text)}</th>" for text in (table.corner, *(each.heading for each in table.columns)))
    rows = []
    for label, *values in table.cells():
        marked = [f"<b>{escape(v)}</b>" if winners[i] == label else escape(v) for i, v in enumerate(values)]
        rows.append(f"<tr><th>{escape(label)}</th>{''.join(f'<td>{cell}</td>' for cell in marked)}</tr>")
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f"<table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>{note}"
    )


def _markdown(text: str) -> str:
    """Escape HTML, emphasis, code and the borders of cells."""
    return re.sub(r"[\\`*<|]", r"\\\g<0>", text)


def _pipes(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def to_csv(table: Table) -> str:
    """Numbers for other programs, unrounded: the `parts` of every measure and the number of seeds that have a value."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    head = [table.corner, "seeds"]
    for column in table.columns:
        head += [f"{column.heading}: {part}" for part in (*column.parts, "seeds")]
    writer.writerow([cell_text(text) for text in head])
    for label, quantities in table.lines:
        row: list[Any] = [cell_text(label), max((len(quantity.values) for quantity in quantities), default=0)]
        for column, quantity in zip(table.columns, quantities, strict=True):
            row += ["" if number is None else repr(number) for number in column.numbers(quantity)]
            row.append(len(quantity.known))
        writer.writerow(row)
    return output.getvalue()


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "<": r"\textless{}",  # this and the next two are other glyphs in TeX's default font
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    return escaped.replace("~", r"\textasciitilde{}").replace("^", r"\textasciicircum{}").replace("±", r"$\pm$")


def to_latex(table: Table) -> str:
    """A `tabular` for the booktabs package, the winner of a column in bold."""
    winners = table.best()
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_latex(table.title)}. {_latex(table.note)}}}".replace(". }", ".}"),
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"\toprule",
        " & ".join([_latex(table.corner), *(_latex(column.heading) for column in table.columns)]) + r" \\",
        r"\midrule",
    ]
    for label, *values in table.cells():
        marked = [rf"\textbf{{{_latex(v)}}}" if winners[i] == label else _latex(v) for i, v in enumerate(values)]
        # After the end of a line, LaTeX reads [ and * as options of the line break.
        guard = "{}" if label.startswith(("[", "*")) else ""
        lines.append(" & ".join([guard + _latex(label), *marked]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def to_rich(table: Table) -> Any:
    """For `rich.console.Console.print`."""
    from rich.table import Table as RichTable
    from rich.text import Text

    winners = table.best()
    # Rich reads a plain string as markup, such as a title "[/b]"; Text it shows as it is.
    drawn = RichTable(
        title=Text(table.title, style="table.title"),
        caption=Text(table.note, style="table.caption") if table.note else None,
        title_justify="left",
        caption_justify="left",
    )
    drawn.add_column(Text(table.corner), no_wrap=True)
    for column in table.columns:
        drawn.add_column(Text(column.heading), justify="right")
    for label, *values in table.cells():
        cells = [Text(v, style="bold" if winners[i] == label else "") for i, v in enumerate(values)]
        drawn.add_row(Text(label), *cells)
    return drawn


def to_text(table: Table, width: int = 160) -> str:
    """What the terminal shows, without colours."""
    from rich.console import Console

    output = io.StringIO()
    Console(file=output, width=width, no_color=True).print(to_rich(table))
    return output.getvalue()


FORMATS: dict[str, Callable[[Table], str]] = {
    "terminal": to_text,
    "markdown": to_markdown,
    "csv": to_csv,
    "latex": to_latex,
}


def render(tables: list[Table], form: str) -> str:
    """All tables as one text, separated by blank lines."""
    return "\n".join(FORMATS[form](table) for table in tables)
