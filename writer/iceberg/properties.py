"""Table properties that the commit path reads. Owns their names, defaults and how their text is understood.

A property is written by people and by other engines: what cannot be read counts as not set, and never stops a table.
"""

from __future__ import annotations

from collections.abc import Mapping

MERGE_ENABLED = "commit.manifest-merge.enabled"
MERGE_MIN_COUNT = "commit.manifest.min-count-to-merge"
MERGE_TARGET_BYTES = "commit.manifest.target-size-bytes"
SNAPSHOT_MAX_AGE_MS = "history.expire.max-snapshot-age-ms"
SNAPSHOTS_MIN = "history.expire.min-snapshots-to-keep"
SNAPSHOTS_MAX = "lakefeed.snapshots-max"
SUMMARIES_MAX_BYTES = "lakefeed.summaries-max-bytes"
CONSUMER_SNAPSHOTS_MAX = "lakefeed.consumer-snapshots-max"
GC_ENABLED = "gc.enabled"
DELETE_OLD_METADATA = "write.metadata.delete-after-commit.enabled"
OLD_METADATA_MAX = "write.metadata.previous-versions-max"
COMMIT_RETRIES = "commit.retry.num-retries"
COMMIT_RETRY_MAX_WAIT_MS = "commit.retry.max-wait-ms"

DAY_MS = 24 * 60 * 60 * 1000

# Iceberg's own default. A streaming reader that was away for longer has to start over.
SNAPSHOT_MAX_AGE_DEFAULT_MS = 5 * DAY_MS
# Of a table that rarely changes, history stays however old it is.
SNAPSHOTS_MIN_DEFAULT = 100
# Every commit writes the metadata of all snapshots, about 1 KB each, so that commits would grow slower with a table's
# age: with these, the last one takes at most half longer than the first. At a commit every ten seconds they are the
# last 80 minutes. A table whose streaming readers may be away for longer sets more, or commits less often.
SNAPSHOTS_MAX_DEFAULT = 500
# Summaries of the snapshots that are kept. Each says of every source in it what it covers, some 180 bytes, and all of
# them are in every metadata file: of a thousand sources, 500 snapshots would be 90 MB a commit.
SUMMARIES_MAX_BYTES_DEFAULT = 8 * 1024 * 1024
# Snapshots that are kept for consumers that are behind. Every commit writes the metadata of all of them, here about 10
# MB; at a commit every ten seconds they are a bit more than a day.
CONSUMER_SNAPSHOTS_MAX_DEFAULT = 10_000
# Older versions of the metadata file, to go back to by hand; nothing reads them. Each is as large as the current one.
OLD_METADATA_MAX_DEFAULT = 20

# What a new change table says of itself, so that operators find the names and other engines keep to the same limits.
UPKEEP_PROPERTIES: Mapping[str, str] = {
    DELETE_OLD_METADATA: "true",
    OLD_METADATA_MAX: str(OLD_METADATA_MAX_DEFAULT),
    SNAPSHOT_MAX_AGE_MS: str(SNAPSHOT_MAX_AGE_DEFAULT_MS),
    SNAPSHOTS_MIN: str(SNAPSHOTS_MIN_DEFAULT),
    SNAPSHOTS_MAX: str(SNAPSHOTS_MAX_DEFAULT),
    SUMMARIES_MAX_BYTES: str(SUMMARIES_MAX_BYTES_DEFAULT),
    # Of other engines: Iceberg's four tries are soon used up beside a writer that commits several times a second.
    COMMIT_RETRIES: "30",
    COMMIT_RETRY_MAX_WAIT_MS: "1000",
}


def read_number(properties: Mapping[str, str], name: str, default: int) -> int:
    """Read a whole number that is not negative; anything else counts as not set."""
    text = properties.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() else default


def is_enabled(properties: Mapping[str, str], name: str) -> bool:
    """Read a switch that is on unless it says false, in any case."""
    return properties.get(name, "true").lower() != "false"
