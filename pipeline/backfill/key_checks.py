"""Whether a key will do for a table that is there. Owns the refusal of keys whose rows mirrors would take for others.

who reads the table                                   goes by
a mirror that is built already                        the key that it was built with
any mirror to come, if the table's key is declared    the columns of the key: row ids do not matter
any other                                             row ids, which have to be those of live changes
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline import tables
from pipeline.backfill.fitting import FittedColumn
from pipeline.backfill.row_ids import form_problem, shown
from pipeline.backfill.target import Target
from pipeline.errors import ConfigError
from pipeline.mirrors.layout import plan_layout
from pipeline.mirrors.markers import MIRROR_KEY
from pipeline.mirrors.names import mirror_names
from pipeline.mirrors.settings import MirrorMode, MirrorSettings
from writer.columns import ROW_ID


def check_forms(target: Target, key: Sequence[FittedColumn]) -> None:
    """Check that ids are those of live changes, where somebody goes by them.

    Raises: ConfigError.
    """
    found = ((column, form_problem(column)) for column in key)
    problems = [f"{shown(column)}: {problem}" for column, problem in found if problem is not None]
    if not problems:
        return
    facts = f"table={target.name}: {'; '.join(problems)}"
    if plan_layout(target.columns(), MirrorSettings()).key_is_row_id:
        raise ConfigError(
            "ids of rows would not be those that live changes have: declare the key as the table's identifier, so that"
            f" mirrors go by its columns: {facts}"
        )
    if mirrors := _mirrors_by_row_id(target):
        raise ConfigError(
            "ids of rows would not be those that live changes have, by which a mirror goes: drop it, so that it is"
            f" built anew by the key that is declared: mirror={','.join(mirrors)} {facts}"
        )


def _mirrors_by_row_id(target: Target) -> list[str]:
    """Name the mirrors that were built before a key was declared, as far as they have their usual names."""
    usual = (MirrorSettings(), MirrorSettings(mode=MirrorMode.HISTORY))
    names = [mirror_names(target.name, settings, target.catalog) for settings in usual]
    return [
        str(each.mirror)
        for each in names
        if tables.exists(target.spark, each.mirror_sql)
        and tables.properties(target.spark, each.mirror_sql).get(MIRROR_KEY) == json.dumps([ROW_ID])
    ]
