"""The tables that belong together: a change table, its mirror, and the mirror's tombstones. Owns their names."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.mirrors.settings import MirrorSettings
from pipeline.tables import TableName

_TOMBSTONES = "_tombstones"
_CONSUMER = "mirror_"


@dataclass(frozen=True, slots=True)
class MirrorNames:
    """Names without the catalog, and `sql` names with it."""

    table: TableName
    mirror: TableName
    catalog: str

    @property
    def table_sql(self) -> str:
        """Name the change table in SQL."""
        return self.table.sql(self.catalog)

    @property
    def mirror_sql(self) -> str:
        """Name the mirror in SQL."""
        return self.mirror.sql(self.catalog)

    @property
    def tombstones(self) -> TableName:
        """Name the table of the mirror's tombstones."""
        return self.mirror.with_name(self.mirror.name + _TOMBSTONES)

    @property
    def tombstones_sql(self) -> str:
        """Name the table of the mirror's tombstones in SQL."""
        return self.tombstones.sql(self.catalog)

    @property
    def consumer(self) -> str:
        """Name the mirror as a consumer of its change table; signs that a tag cannot have become '-'."""
        kept = (sign if sign.isascii() and (sign.isalnum() or sign == "_") else "-" for sign in self.mirror.name)
        return (_CONSUMER + "".join(kept))[:100]


def mirror_names(table: TableName, settings: MirrorSettings, catalog: str) -> MirrorNames:
    """Name the tables of a mirror."""
    return MirrorNames(table, table.with_name(settings.target_name(table.name)), catalog)
