"""The charts of an experiment: plain data with a title and a caption, which `html` and `figures` draw."""

from __future__ import annotations

from fedpick.report.charts import choices, learned, one_round, outcome, training
from fedpick.report.charts.chart import Section
from fedpick.report.material import Material

__all__ = ["sections_of"]


def sections_of(material: Material, *, against: str | None = None, window: int = 1) -> tuple[Section, ...]:
    """Every section that has data, in order. `against`: the policy to compare the others with."""
    wanted = (
        ("results", "Results", training.charts(material, against, window)),
        ("time", "Time", one_round.charts(material)),
        ("outcome", "What the clients get", outcome.charts(material)),
        ("choices", "Who was chosen", choices.selection_charts(material)),
        ("groups", "Groups of clients", choices.group_charts(material)),
        ("weights", "Weights and labels", choices.weight_charts(material)),
        ("appendix", "Appendix", learned.charts(material)),
    )
    sections = []
    for key, title, charts in wanted:
        present = tuple(chart for chart in charts if chart is not None)
        if present:
            sections.append(Section(key=key, title=title, charts=present))
    return tuple(sections)
