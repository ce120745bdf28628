"""Appending rows to a table from a command: beside the service, which may be committing to it at the same time.

Owns the way from decoded rows to their snapshot: agree on columns, write files, commit. Unlike a flush it is never
mended on the way: if the table has moved past the plan, the caller hears of it and plans again.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

import pyarrow as pa

from writer.changes import SourceId, Span
from writer.commit_plan import Flush
from writer.committer import CommitResult
from writer.errors import RowsUnfit
from writer.file_writing import write_files
from writer.flush_control import FlushControl
from writer.table_columns import TableColumns
from writer.table_context import TableContext


async def append_rows(
    rows: Sequence[pa.Table],
    columns: TableColumns,
    context: TableContext,
    *,
    spans: Mapping[SourceId, Span],
    properties: Mapping[str, str],
) -> CommitResult:
    """Commit rows that were decoded to these columns, with the marks and properties that belong to them.

    Cancelling leaves them committed or not; the table's marks tell.

    Raises:
        RowsAlreadyCommitted: the marks have moved past the spans.
        WriterError: not committed, as far as we know.
    """
    state = await columns.agree()
    flush_id = str(uuid.uuid4())
    config = columns.settings.config
    files_for = FlushControl(config).files_for
    try:
        written = await write_files(
            rows, state, context, config=config, flush_id=flush_id, files_for=files_for, spans=spans
        )
    except pa.ArrowInvalid:
        raise RowsUnfit(f"rows do not fit the table's columns any more: table={state.name}") from None
    flush = Flush(
        id=flush_id,
        node=context.node,
        log_from=0,
        log_to=0,
        spans=spans,
        files=written.files,
        properties=properties,
        ledger=written.ledger,
    )
    result = await context.committer.commit(state, flush)
    columns.state = result.state
    return result
