"""Everything in a store that must not depend on when, how often or by how many processes it was written."""

from __future__ import annotations

import sqlalchemy as sa

from fedpick.experiments import schema as tables

_CLOCKS = {"wall_seconds", "select_seconds", "measure_seconds", "train_seconds", "evaluate_seconds"}
_MADE_OF_CLOCKS = {"checksums", "leases"}
_MOMENTS = {"touched", "touched_at", "manifest", "written_by"}


def content(store):
    """table -> sorted rows. Rows of runs are named by the run's key: ids are given in order of arrival."""
    found = {}
    with store.engine.connect() as connection:
        names = dict(connection.execute(sa.select(tables.runs.c.id, tables.runs.c.key)).all())
        federations = dict(connection.execute(sa.select(tables.federations.c.id, tables.federations.c.key)).all())
        for table in tables.metadata.sorted_tables:
            if table.name in _MADE_OF_CLOCKS:
                continue
            rows = []
            for row in connection.execute(sa.select(table)):
                values = {k: v for k, v in row._mapping.items() if k not in _CLOCKS | _MOMENTS | {"id"}}
                if "run_id" in values:
                    values["run_id"] = names[values["run_id"]]
                if values.get("federation_id") is not None:
                    values["federation_id"] = federations[values["federation_id"]]
                rows.append(tuple(values.items()))
            found[table.name] = sorted(rows, key=repr)
    return found
