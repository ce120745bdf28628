"""The `_cdc_` columns of a group as Arrow arrays. Owns their values; their names belong to columns.py."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from writer import columns as names
from writer.rows.groups import ChangeGroup, Group, Image

_US_PER_MS = 1000
_NULL = msgspec.Raw(b"null")

# A row whose bytes are not UTF-8 is kept as {"_cdc_base64": "..."}: the prefix is ours, no row is mistaken for it.
BASE64_KEY = "_cdc_base64"


def change_columns(
    group: ChangeGroup, schema: pa.Schema, *, rescued: Sequence[str | None] | None
) -> dict[str, pa.Array]:
    """Build those `_cdc_` columns of a group that its table has."""
    build: dict[str, Callable[[pa.DataType], pa.Array]] = {
        names.SEQUENCE: lambda type_: pa.array(group.sequences, type_),
        names.TIMESTAMP: lambda type_: moments(_timestamps_us(group)).cast(type_),
        names.OPERATION: lambda type_: pa.array(group.operations, type_),
        names.ROW_ID: lambda type_: pa.array(group.row_ids, type_),
        names.SOURCE: lambda type_: sources_of(group).cast(type_),
        names.INGESTED_AT: lambda type_: moments(received_at_us(group)).cast(type_),
        names.BEFORE: lambda type_: _or_nulls(group, _texts_of(group.befores), type_),
        names.UNCHANGED: lambda type_: _or_nulls(group, group.unchanged, type_),
        names.METADATA: lambda type_: _or_nulls(group, _texts_of(group.metadata), type_),
        names.RESCUED: lambda type_: _or_nulls(group, rescued, type_),
        names.PARTITION: lambda type_: pa.nulls(len(group), type_),  # filled by routing.py when all columns are there
        names.EPOCH: lambda type_: epochs_of(group).cast(type_),
    }
    return {name: make(schema.field(name).type) for name, make in build.items() if name in schema.names}


def text_of(image: Image) -> str:
    """Give a row's JSON text, as it was received where it is UTF-8."""
    try:
        return bytes(image).decode()
    except UnicodeDecodeError:
        return msgspec.json.encode({BASE64_KEY: base64.b64encode(bytes(image)).decode()}).decode()


def _texts_of(images: Sequence[Image] | None) -> list[str | None] | None:
    if images is None:
        return None
    return [text_of(image) if image and image != _NULL else None for image in images]


def _or_nulls(group: ChangeGroup, values: Sequence[object] | None, type_: pa.DataType) -> pa.Array:
    return pa.nulls(len(group), type_) if values is None else pa.array(values, type_)


def _run_lengths(group: Group) -> list[int]:
    return [run.stop - run.start for run in group.runs]


def sources_of(group: Group) -> pa.Array:
    """Give the source of each change."""
    sources = [run.source for run in group.runs]
    rows = np.repeat(np.arange(len(sources)), _run_lengths(group))
    return pa.array(sources, pa.string()).take(pa.array(rows))


def epochs_of(group: Group) -> pa.Array:
    """Give the epoch of each change; null stands for the first one, 0, in which nearly every source stays."""
    if not any(run.epoch for run in group.runs):
        return pa.nulls(len(group), pa.int64())
    epochs = np.repeat(np.array([run.epoch for run in group.runs], np.int64), _run_lengths(group))
    return pa.array(epochs, mask=epochs == 0)


def received_at_us(group: Group) -> npt.NDArray[np.int64]:
    """Give the time of receipt of each change."""
    return np.repeat(np.array([run.received_at_us for run in group.runs], np.int64), _run_lengths(group))


def moments(times_us: npt.NDArray[np.int64]) -> pa.Array:
    """Give microseconds as moments, which stay the same whatever a table's column counts in."""
    return pa.array(times_us, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def _timestamps_us(group: ChangeGroup) -> np.ndarray:
    """Give the time of each change; admission has bounded it, so that microseconds fit. 0 is the time of receipt."""
    timestamps_ms = np.array(group.timestamps, np.int64)
    return np.where(timestamps_ms == 0, received_at_us(group), timestamps_ms * _US_PER_MS)
