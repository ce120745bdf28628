"""Table properties that the catalog reads: their names, defaults and how their text is understood."""

from __future__ import annotations

from collections.abc import Mapping

from lakefeed.catalog.json_fields import parse_count

FORMAT_VERSION = "format-version"
COMPRESSION_CODEC = "write.parquet.compression-codec"
PREVIOUS_VERSIONS_MAX = "write.metadata.previous-versions-max"
DELETE_AFTER_COMMIT = "write.metadata.delete-after-commit.enabled"
GC_ENABLED = "gc.enabled"
APPEND_ONLY = "lakefeed.append-only"

_PREVIOUS_VERSIONS_DEFAULT = 100  # as in Iceberg

# Java clients of other catalogs write zstd by default. Over REST the server must set it, or they fall back to gzip.
DEFAULT_PROPERTIES: Mapping[str, str] = {COMPRESSION_CODEC: "zstd"}


def is_true(properties: Mapping[str, str], name: str) -> bool:
    """Return a boolean property as Java reads it: only the word true, in any case, is true."""
    return properties.get(name, "").lower() == "true"


def may_be_purged(properties: Mapping[str, str]) -> bool:
    """Return whether a table's files may be deleted with it, which is the default."""
    return GC_ENABLED not in properties or is_true(properties, GC_ENABLED)


def previous_versions_max(properties: Mapping[str, str]) -> int:
    """Return how many older metadata files the metadata log names: at least one; the default if it is no number."""
    count = parse_count(properties.get(PREVIOUS_VERSIONS_MAX, ""))
    return _PREVIOUS_VERSIONS_DEFAULT if count is None else max(1, count)
