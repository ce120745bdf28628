"""Grammar of transforms and of the settings `partition` and `sort`, before any table is known. Owns no column types.

    partition:   none | term {, term}           term:   transform(column)          day(_cdc_timestamp)
    sort:        empty | key {, key}            key:    (column | term) [asc | desc] [nulls first | nulls last]

A transform is spelled as in table metadata: identity, void, year, month, day, hour, bucket[16], truncate[4]. A column
inside a struct is a path: address.zip. Standard library only, because commands that need no Arrow read settings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from lakefeed.contract.errors import WriterError

NO_PARTITION = "none"

PLAIN_TRANSFORMS = ("identity", "void", "year", "month", "day", "hour")
WIDE_TRANSFORMS = ("bucket", "truncate")
WIDTH_MAX = 2**31 - 1  # an int in every implementation

# Bounded digits: Python refuses to read a number of more than 4,300.
_TRANSFORM = re.compile(r"([a-z]+)(?:\[([0-9]{1,10})\])?")
_TERM = re.compile(r"(\w+(?:\[\d+\])?)\(([^()]+)\)")
_KEY = re.compile(
    r"(?:(?P<transform>\w+(?:\[\d+\])?)\((?P<source>[^()]+)\)|(?P<column>[^()\s]+))"
    r"(?:\s+(?P<direction>asc|desc))?(?:\s+nulls\s+(?P<nulls>first|last))?",
    re.IGNORECASE,
)


class PartitionRejected(WriterError, ValueError):
    """A spec cannot be used here: change the setting, or the table's spec."""


class SortRejected(WriterError, ValueError):
    """A sort order cannot be used here: change the setting."""


@dataclass(frozen=True, slots=True)
class Transform:
    """A transform by its kind; `width` is N of bucket[N] and W of truncate[W], else 0."""

    kind: str
    width: int = 0

    @property
    def is_identity(self) -> bool:
        """Return whether every value is its own image."""
        return self.kind == "identity"

    @property
    def is_void(self) -> bool:
        """Return whether every image is null, as of a field that was dropped from a spec of format 1."""
        return self.kind == "void"

    @property
    def keeps_order(self) -> bool:
        """Return whether a smaller value never has a greater image."""
        return self.kind != "bucket"


IDENTITY = Transform("identity")


@dataclass(frozen=True, slots=True)
class PartitionTerm:
    """One field of a partition: the transform's text and the column's name."""

    transform: str
    column: str


@dataclass(frozen=True, slots=True)
class SortTerm:
    """One key of a sort order."""

    transform: str
    column: str
    is_descending: bool
    nulls_first: bool


@lru_cache(maxsize=256)
def parse_transform(text: str) -> Transform | None:
    """Read a transform as table metadata spells it; None for one that the specification does not define."""
    match = _TRANSFORM.fullmatch(text)
    kind, width = (match[1], match[2]) if match else ("", None)
    if kind in PLAIN_TRANSFORMS and width is None:
        return Transform(kind)
    if kind in WIDE_TRANSFORMS and 0 < int(width or 0) <= WIDTH_MAX:
        return Transform(kind, int(width or 0))
    return None


def parse_partition_terms(text: str) -> tuple[PartitionTerm, ...]:
    """Read the setting `partition`. Raise PartitionRejected if a term cannot be parsed, or comes twice."""
    if text.strip() == NO_PARTITION:
        return ()
    terms = []
    for term in map(str.strip, text.split(",")):
        match = _TERM.fullmatch(term)
        if match is None:
            raise PartitionRejected(f"partition must be `none` or transform(column): term={term}")
        if parse_transform(match[1]) is None:
            raise PartitionRejected(f"partition transform is not known: transform={match[1]}")
        terms.append(PartitionTerm(match[1], match[2].strip()))
    if len(set(terms)) < len(terms):
        raise PartitionRejected(f"partition has a term twice: partition={text}")
    return tuple(terms)


def parse_sort_terms(text: str) -> tuple[SortTerm, ...]:
    """Read the setting `sort`; empty means no order. Raise SortRejected if a key cannot be parsed."""
    terms = []
    for term in map(str.strip, text.split(",") if text.strip() else ()):
        match = _KEY.fullmatch(term)
        if match is None:
            raise SortRejected(f"sort must be columns with asc or desc behind them: term={term}")
        transform = match["transform"] or "identity"
        if parse_transform(transform) is None:
            raise SortRejected(f"sort transform is not known: term={term}")
        is_descending = (match["direction"] or "asc").lower() == "desc"
        nulls_first = match["nulls"].lower() == "first" if match["nulls"] else not is_descending
        terms.append(SortTerm(transform, (match["source"] or match["column"]).strip(), is_descending, nulls_first))
    return tuple(terms)
