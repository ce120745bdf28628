"""Changes folded to the rows that are left, as a mirror would."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from lakefeed.ingest.debezium.events import Change, SourceOperation

Row = dict[str, Any]


class Mirror:
    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Row]] = defaultdict(dict)
        self.keyless: dict[str, list[Row]] = defaultdict(list)
        self._departed: dict[tuple[str, str], Row] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if change.operation is SourceOperation.TRUNCATE:
                self.rows.pop(change.table, None)
                self.keyless.pop(change.table, None)
            elif change.operation is not SourceOperation.MESSAGE:
                (self._apply if change.row_id else self._apply_keyless)(change)

    def of(self, table: str) -> list[Row]:
        return [*self.rows.get(table, {}).values(), *self.keyless.get(table, ())]

    def _apply(self, change: Change) -> None:
        rows = self.rows[change.table]
        if change.operation is SourceOperation.DELETE:
            self._departed[change.table, change.row_id] = rows.pop(change.row_id)
            return
        row = json.loads(bytes(change.after))
        if change.unchanged:
            known = rows.get(change.row_id) or self._departed[change.table, change.moved_from]
            row |= {name: known[name] for name in change.unchanged}
        rows[change.row_id] = row

    def _apply_keyless(self, change: Change) -> None:
        rows = self.keyless[change.table]
        if len(change.before):
            rows.remove(json.loads(bytes(change.before)))
        if change.operation is not SourceOperation.DELETE:
            rows.append(json.loads(bytes(change.after)))
