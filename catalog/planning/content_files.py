"""Data and delete files as JSON, as the REST specification's content files. Core: owns the form, decides nothing.

Bounds are the upper-case hexadecimal of their binary form: that is what Iceberg's own client reads, though the
specification's schema says values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from catalog.fields import JsonObject
from catalog.planning.manifests import Content, Entry
from catalog.planning.partitions import Spec
from catalog.planning.values import show_value

_CONTENTS = {
    Content.DATA: "data",
    Content.POSITION_DELETES: "position-deletes",
    Content.EQUALITY_DELETES: "equality-deletes",
}
STATISTICS = (
    "column_sizes",
    "value_counts",
    "null_value_counts",
    "nan_value_counts",
    "lower_bounds",
    "upper_bounds",
)
_ALWAYS_SHOWN = ("split_offsets", "sort_order_id")
_SHOWN_OF_DELETES = ("equality_ids", "referenced_data_file", "content_offset", "content_size_in_bytes")


def show_data_file(entry: Entry, spec: Spec, stats_fields: Collection[int]) -> JsonObject:
    """Write a data file with the statistics of the columns asked for."""
    shown = _show_file(entry, spec)
    if entry.first_row_id is not None:
        shown["first-row-id"] = entry.first_row_id
    if stats_fields:
        shown |= _show_statistics(entry.file, stats_fields)
    return shown


def show_delete_file(entry: Entry, spec: Spec) -> JsonObject:
    """Write a delete file."""
    return _show_file(entry, spec) | _show_present(entry.file, _SHOWN_OF_DELETES)


def _show_file(entry: Entry, spec: Spec) -> JsonObject:
    file = entry.file
    shown = {
        "content": _CONTENTS[entry.content],
        "file-path": file["file_path"],
        "file-format": file["file_format"].lower(),
        "spec-id": entry.spec_id,
        "partition": [
            show_value(field.type_, value) for field, value in zip(spec.fields, entry.partition, strict=True)
        ],
        "file-size-in-bytes": file["file_size_in_bytes"],
        "record-count": file["record_count"],
        **_show_present(file, _ALWAYS_SHOWN),
    }
    if file.get("key_metadata") is not None:
        shown["key-metadata"] = file["key_metadata"].hex().upper()
    return shown


def _show_present(file: Mapping[str, Any], names: Collection[str]) -> JsonObject:
    return {name.replace("_", "-"): file[name] for name in names if file.get(name) is not None}


def _show_statistics(file: Mapping[str, Any], stats_fields: Collection[int]) -> JsonObject:
    shown = {}
    for name in STATISTICS:
        known = [(pair["key"], pair["value"]) for pair in file.get(name) or () if pair["key"] in stats_fields]
        if known:
            values = [value.hex().upper() if isinstance(value, bytes) else value for _, value in known]
            shown[name.replace("_", "-")] = {"keys": [key for key, _ in known], "values": values}
    return shown
