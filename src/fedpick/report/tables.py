"""The tables, for the terminal, Markdown, CSV and LaTeX.

A cell is the mean over the seeds ± their sample standard deviation; N/A: some seed never got there, as in the papers.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedpick.core.errors import InvalidInput
from fedpick.experiments.tuning import Choice
from fedpick.report import analysis
from fedpick.report.analysis import Difference, PolicyResults, Quantity, Results, RunResults

__all__ = [
    "FORMATS",
    "Column",
    "DifferenceColumn",
    "Table",
    "difference_columns",
    "difference_table",
    "render",
    "search_table",
    "tables_of",
    "to_csv",
    "to_latex",
    "to_markdown",
    "to_rich",
]

NOT_REACHED = "N/A"


@dataclass(frozen=True)
class Column:
    """One measure: its heading, the value per run, how it is written and which end is good."""

    heading: str
    measure: Callable[[RunResults], float | None]
    digits: int = 1
    scale: float = 1.0
    best: str = ""
    """"low", "high" or "" (no end is better)."""

    parts: ClassVar[tuple[str, ...]] = ("mean", "sd")
    """What a CSV file has of every measure, beside the number of seeds."""

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
    """A finished table: one line per policy."""

    title: str
    columns: tuple[Column, ...]
    lines: tuple[tuple[str, tuple[Quantity, ...]], ...]
    """(label, a quantity per column)."""
    note: str = ""
    corner: str = "policy"
    """What the lines are."""
    policies: tuple[str, ...] = ()
    """Whose line each is, where the labels are not the policies'."""

    def cells(self) -> list[list[str]]:
        """Texts, the label first."""
        return [
            [label, *(column.text(quantity) for column, quantity in zip(self.columns, quantities, strict=True))]
            for label, quantities in self.lines
        ]

    def best(self) -> list[str | None]:
        """The label of the best line of each column; None where nothing is better or nobody got there."""
        winners: list[str | None] = []
        for position, column in enumerate(self.columns):
            means = [(line[1][position].mean, line[0]) for line in self.lines]
            known = [(mean, label) for mean, label in means if mean is not None]
            if not column.best or len(known) < 2:
                winners.append(None)
            else:
                pick = min if column.best == "low" else max
                winners.append(pick(known, key=lambda pair: pair[0])[1])
        return winners


def _percent(target: float) -> str:
    return f"{100 * target:g} %"


def _accuracy_columns(results: Results, window: int) -> list[Column]:
    if window < 1:
        raise InvalidInput(f"The window, a number of evaluations, must be at least 1. Got {window}.")
    columns = []
    for target in results.experiment.targets:

        def raw(run: RunResults, target: float = target) -> float | None:
            return analysis.rounds_to_target(run, target)

        def smooth(run: RunResults, target: float = target) -> float | None:
            return analysis.rounds_to_target(run, target, window)

        columns.append(Column(f"rounds to {_percent(target)}", raw, best="low"))
        if window > 1:
            columns.append(Column(f"rounds to {_percent(target)}, mean of {window}", smooth, best="low"))
    columns += _loss_target_columns(results)
    columns.append(Column("final accuracy %", analysis.final_accuracy, 2, 100.0, "high"))
    if window > 1:
        columns.append(
            Column(f"mean of last {window} %", lambda run: analysis.final_accuracy(run, window), 2, 100.0, "high")
        )
    columns.append(Column("best accuracy %", analysis.best_accuracy, 2, 100.0, "high"))
    columns.append(Column("lowest test loss", analysis.lowest_loss, 4, best="low"))
    return columns


def _loss_target_columns(results: Results) -> list[Column]:
    columns = []
    for target in results.experiment.loss_targets:

        def rounds(run: RunResults, target: float = target) -> float | None:
            return analysis.rounds_to_loss(run, target)

        columns.append(Column(f"rounds to loss {target:g}", rounds, best="low"))
    return columns


def _cost_columns(results: Results) -> list[Column]:
    columns = []
    for target in results.experiment.targets:

        def models(run: RunResults, target: float = target) -> float | None:
            return analysis.models_to_target(run, target)

        def sent(run: RunResults, target: float = target) -> float | None:
            return analysis.bytes_to_target(run, target)

        columns.append(Column(f"models to {_percent(target)}", models, best="low"))
        columns.append(Column(f"MB to {_percent(target)}", sent, 2, 1e-6, "low"))
    columns.append(Column("variance of selection counts", analysis.selection_variance, 2))
    return columns


def _time_columns() -> list[Column]:
    def seconds(part: str) -> Column:
        return Column(f"{part} ms", lambda run: analysis.seconds_per_round(run, part), 2, 1e3)

    return [seconds(part) for part in analysis.parts_of_a_round()]


def _table(title: str, columns: list[Column], policies: tuple[PolicyResults, ...], note: str = "") -> Table:
    lines = tuple(
        (policy.label, tuple(analysis.over_seeds(policy, column.measure) for column in columns)) for policy in policies
    )
    return Table(title, tuple(columns), lines, note)


def tables_of(results: Results, window: int = 1) -> list[Table]:
    """Accuracy, cost and time. `window` adds columns for the mean over so many evaluations."""
    seeds = max((len(policy.runs) for policy in results.policies), default=0)
    note = (
        f"Mean ± standard deviation over {seeds} seeds. N/A: some seed never reached the target." if seeds > 1 else ""
    )
    missing = results.incomplete
    if missing:
        note = f"{note} Not finished: {'; '.join(missing)}.".strip()
    return [
        _table(f"{results.experiment.title}: accuracy", _accuracy_columns(results, window), results.policies, note),
        _table("Cost and fairness", _cost_columns(results), results.policies),
        _table("Time waited for, per round (mean over the second half)", _time_columns(), results.policies),
    ]


def difference_columns(results: Results, window: int = 1) -> tuple[DifferenceColumn, ...]:
    """The measures in which policies are compared pair by pair."""
    wanted = [column for column in _accuracy_columns(results, window) if not column.heading.startswith("best")]
    return tuple(DifferenceColumn(each.heading, each.measure, each.digits, each.scale, each.best) for each in wanted)


def difference_table(results: Results, against: str, window: int = 1) -> Table:
    """Every other policy minus the one called `against`, paired by seed, with 95 % confidence intervals."""
    baseline = analysis.policy_named(results, against)
    # No end of a column is marked: every line is judged by itself, against the baseline.
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
    if missing := results.incomplete:
        note = f"{note} Not finished: {'; '.join(missing)}."
    return Table(f"Paired differences to {baseline.label}", columns, lines, note)


def search_table(title: str, choices: Sequence[Choice], score: str, note: str) -> Table:
    """A search for learning rates: a line per pair of rates, a column per policy, its best marked."""
    best = "high" if score == "accuracy" else "low"
    columns = tuple(Column(choice.label, lambda run: None, 4, 1.0, best) for choice in choices)
    lines = tuple(
        (str(candidate), tuple(Quantity((choice.scores[place][1],)) for choice in choices))
        for place, (candidate, _) in enumerate(choices[0].scores)
    )
    return Table(title, columns, lines, note, corner="learning rates")


def to_markdown(table: Table) -> str:
    """A pipe table; the best of a column is bold."""
    winners = table.best()

    def mark(cells: list[str]) -> list[str]:
        label, *values = cells
        return [label, *(f"**{v}**" if winners[i] == label else v for i, v in enumerate(values))]

    head = [table.corner, *(column.heading for column in table.columns)]
    lines = [f"**{table.title}**", "", _pipes(head), _pipes(["---", *("---:" for _ in table.columns)])]
    lines += [_pipes(mark(cells)) for cells in table.cells()]
    if table.note:
        lines += ["", table.note]
    return "\n".join(lines) + "\n"


def _pipes(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def to_csv(table: Table) -> str:
    """Numbers for other programs, unscaled and unrounded: mean, sd and seeds that got there, per measure."""
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    head = [table.corner, "seeds"]
    for column in table.columns:
        head += [f"{column.heading}: {part}" for part in (*column.parts, "seeds")]
    writer.writerow(head)
    for label, quantities in table.lines:
        row: list[Any] = [label, max((len(quantity.values) for quantity in quantities), default=0)]
        for column, quantity in zip(table.columns, quantities, strict=True):
            row += ["" if number is None else repr(number) for number in column.numbers(quantity)]
            row.append(len(quantity.known))
        writer.writerow(row)
    return output.getvalue()


_LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}"}


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(letter, letter) for letter in text)
    return escaped.replace("~", r"\textasciitilde{}").replace("^", r"\textasciicircum{}").replace("±", r"$\pm$")


def to_latex(table: Table) -> str:
    """A `tabular` for the booktabs package; the best of a column is bold."""
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
        lines.append(" & ".join([_latex(label), *marked]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def to_rich(table: Table) -> Any:
    """For `rich.console.Console.print`."""
    from rich.table import Table as RichTable
    from rich.text import Text

    winners = table.best()
    # As Text: Rich would read a plain string as markup, and a title such as "[5, 10]" or "[/b]" is not.
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
    """All tables in one text, a blank line in between."""
    return "\n".join(FORMATS[form](table) for table in tables)
