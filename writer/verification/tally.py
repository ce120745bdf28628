"""Counts rows as ledgers do: per source, from the rows themselves. Owns how a table of rows becomes facts."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from writer import columns as cdc
from writer.changes import SourceId
from writer.verification.ledger import RowFacts, join_facts
from writer.verification.row_hash import hash_rows

_HASH = "hash"


def tally_rows(rows: pa.Table, fields: Sequence[pa.Field]) -> dict[SourceId, RowFacts]:
    """Count rows by their source; fields are those of the columns, with their Iceberg ids."""
    slim = rows.select([cdc.SOURCE, cdc.OPERATION, cdc.SEQUENCE]).append_column(
        _HASH, pa.array(hash_rows(rows, fields))
    )
    counted = slim.group_by([cdc.SOURCE, cdc.OPERATION], use_threads=False).aggregate(
        [(_HASH, "sum"), (_HASH, "count"), (cdc.SEQUENCE, "min"), (cdc.SEQUENCE, "max")]
    )
    return join_facts(
        {
            SourceId(group[cdc.SOURCE]): RowFacts(
                rows=group[f"{_HASH}_count"],
                first=group[f"{cdc.SEQUENCE}_min"],
                last=group[f"{cdc.SEQUENCE}_max"],
                operations={group[cdc.OPERATION]: group[f"{_HASH}_count"]},
                checksum=group[f"{_HASH}_sum"],
            )
        }
        for group in counted.to_pylist()
    )
