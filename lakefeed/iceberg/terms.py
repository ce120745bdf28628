"""The settings `partition` and `sort` as terms, before any table is known. Owns their grammar, no column types.

    partition:   none | term {, term}           term:   transform(column)          day(_cdc_timestamp)
    sort:        empty | key {, key}            key:    (column | term) [asc | desc] [nulls first | nulls last]

A transform is spelled as in table metadata: identity, void, year, month, day, hour, bucket[16], truncate[4]. A column
inside a struct is a path: address.zip. Standard library only: settings are read by commands that need no Arrow.
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

_TRANSFORM = re.compile(r"([a-z]+)(?:\[(\d+)\])?")
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
def parse_transform(text: str) -> Transform:
    """Read a transform as table metadata spells it.

    Raises:
        PartitionRejected: it is not one that we can compute.
    """
    match = _TRANSFORM.fullmatch(text)
    kind, width = (match[1], match[2]) if match else ("", None)
    if kind in PLAIN_TRANSFORMS and width is None:
        return Transform(kind)
    if kind in WIDE_TRANSFORMS and 0 < int(width or 0) <= WIDTH_MAX:
        return Transform(kind, int(width or 0))
    raise PartitionRejected(f"partition transform is not known: transform={text}")


def parse_partition_terms(text: str) -> tuple[PartitionTerm, ...]:
    """Read the setting `partition`.

    Raises:
        PartitionRejected: a term is not understood, or comes twice.
    """
    if text.strip() == NO_PARTITION:
        return ()
    terms = tuple(_parse_partition_term(term.strip()) for term in text.split(","))
    if len(set(terms)) < len(terms):
        raise PartitionRejected(f"partition has a term twice: partition={text}")
    return terms


def _parse_partition_term(term: str) -> PartitionTerm:
    match = _TERM.fullmatch(term)
    if match is None:
        raise PartitionRejected(f"partition must be `none` or transform(column): term={term}")
    parse_transform(match[1])
    return PartitionTerm(match[1], match[2].strip())


def parse_sort_terms(text: str) -> tuple[SortTerm, ...]:
    """Read the setting `sort`; empty means no order.

    Raises:
        SortRejected: a key is not understood.
    """
    return tuple(_parse_sort_term(term.strip()) for term in text.split(",")) if text.strip() else ()


def _parse_sort_term(term: str) -> SortTerm:
    match = _KEY.fullmatch(term)
    if match is None:
        raise SortRejected(f"sort must be columns with asc or desc behind them: term={term}")
    transform = match["transform"] or "identity"
    try:
        parse_transform(transform)
    except PartitionRejected as error:
        raise SortRejected(f"sort transform is not known: term={term}") from error
    is_descending = (match["direction"] or "asc").lower() == "desc"
    nulls_first = match["nulls"].lower() == "first" if match["nulls"] else not is_descending
    return SortTerm(transform, (match["source"] or match["column"]).strip(), is_descending, nulls_first)
