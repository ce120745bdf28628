"""Table properties that the catalog itself reads. Owns their names, defaults and how their text is understood."""

from __future__ import annotations

from collections.abc import Mapping

from catalog.fields import parse_count

FORMAT_VERSION = "format-version"
COMPRESSION_CODEC = "write.parquet.compression-codec"
DATA_PATH = "write.data.path"
METADATA_PATH = "write.metadata.path"
PREVIOUS_VERSIONS_MAX = "write.metadata.previous-versions-max"
DELETE_AFTER_COMMIT = "write.metadata.delete-after-commit.enabled"
GC_ENABLED = "gc.enabled"
APPEND_ONLY = "lakefeed.append-only"

# Iceberg's own default.
_PREVIOUS_VERSIONS_DEFAULT = 100

# Java clients of other catalogs write zstd by default; over REST the server has to say so, or they fall back to gzip.
DEFAULT_PROPERTIES: Mapping[str, str] = {COMPRESSION_CODEC: "zstd"}


def is_true(properties: Mapping[str, str], name: str) -> bool:
    """Read a boolean property as Java does: only the word true, in any case, is true."""
    return properties.get(name, "").lower() == "true"


def may_be_purged(properties: Mapping[str, str]) -> bool:
    """Tell whether a table's files are its alone, as they are unless it says otherwise."""
    return GC_ENABLED not in properties or is_true(properties, GC_ENABLED)


def previous_versions_max(properties: Mapping[str, str]) -> int:
    """Return how many older metadata files the metadata log names: at least one, and the default for nonsense."""
    count = parse_count(properties.get(PREVIOUS_VERSIONS_MAX, ""))
    return _PREVIOUS_VERSIONS_DEFAULT if count is None else max(1, count)
