"""Progress of a table: the marker that every commit moves, and its form in properties and snapshot summaries.

    table property     lakefeed.progress   {"complete":{"shop":[0,8700]},"generations":{"n1":17},
                                            "nodes":{"n1":4711},"sources":{"shop":[0,9000]}}
    snapshot summary   lakefeed.flush-id   lakefeed.node   lakefeed.log-from   lakefeed.log-to
                       lakefeed.sources    {"shop":[0,8501,9000]}     (epoch, first and last sequence of this flush)

    nodes          the next log offset that a node has to read for this table
    sources        epoch and sequence of the last committed change of a source
    generations    the generation of the service that last committed under a node id: the fencing token
    complete       low watermark of a source over all tables: every change up to it is committed, in whichever table

The property is the total, the summary is the part of one flush: if another client has removed the property, the
summaries of the snapshots that remain say the same. A watermark that held once always holds, so of
several tables the highest counts, and a source may resume from it on any node. Tables that earlier versions committed
last have neither `generations` nor `complete`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lakefeed.contract.changes import Position, SourceId, Span
from lakefeed.contract.errors import WriterError

PROGRESS_PROPERTY = "lakefeed.progress"
FLUSH_ID_KEY = "lakefeed.flush-id"
NODE_KEY = "lakefeed.node"
LOG_FROM_KEY = "lakefeed.log-from"
LOG_TO_KEY = "lakefeed.log-to"
SOURCES_KEY = "lakefeed.sources"


class ProgressUnreadable(WriterError):
    """A table's marker is damaged: nothing may be committed to the table until an operator has repaired it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A table's marker, as drawn above."""

    nodes: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[SourceId, Position] = field(default_factory=dict)
    generations: Mapping[str, int] = field(default_factory=dict)
    complete: Mapping[SourceId, Position] = field(default_factory=dict)

    def advance(
        self,
        *,
        node: str,
        log_to: int,
        sources: Mapping[SourceId, Position],
        generation: int = 0,
        complete: Mapping[SourceId, Position] | None = None,
    ) -> Progress:
        """Return the marker after a commit. Neither a source nor a generation ever moves back."""
        before = self.generations.get(node, 0)
        # A later service under the same id may have another log, whose offsets cannot be compared.
        offset = log_to if generation > before else max(log_to, self.nodes.get(node, 0))
        generations = {**self.generations, node: max(generation, before)} if generation else self.generations
        return Progress(
            {**self.nodes, node: offset},
            _moved_on(self.sources, sources),
            generations,
            _moved_on(self.complete, complete or {}),
        )

    def marks_in(self, spans: Mapping[SourceId, Span]) -> dict[SourceId, Position]:
        """Return the marks of the sources that have some of these changes committed already."""
        marks = {source: self.sources[source] for source in spans if source in self.sources}
        return {source: mark for source, mark in marks.items() if mark >= spans[source].first}

    def to_text(self) -> str:
        """Return the table property."""
        parts = {
            "nodes": dict(self.nodes),
            "sources": _to_pairs(self.sources),
            "generations": dict(self.generations),
            "complete": _to_pairs(self.complete),
        }
        return encode({name: part for name, part in parts.items() if part})


def _moved_on(
    known: Mapping[SourceId, Position], positions: Mapping[SourceId, Position]
) -> Mapping[SourceId, Position]:
    return {**known, **{source: max(each, known.get(source, each)) for source, each in positions.items()}}


def _to_pairs(positions: Mapping[SourceId, Position]) -> dict[str, tuple[int, int]]:
    return {str(source): (each.epoch, each.sequence) for source, each in positions.items()}


def progress_from_text(text: str | None) -> Progress:
    """Return the marker of a table property; a table without the property has no progress yet.

    Raises: ProgressUnreadable if the text is not a marker.
    """
    if text is None:
        return Progress()
    try:
        document = decode_object(text)
        return Progress(
            as_numbers(document.get("nodes", {})),
            _from_pairs(document.get("sources", {})),
            as_numbers(document.get("generations", {})),
            _from_pairs(document.get("complete", {})),
        )
    except ValueError as error:
        raise ProgressUnreadable(f"progress marker is damaged: {error}: text={text[:200]}") from error


def _from_pairs(value: Any) -> dict[SourceId, Position]:
    positions = {}
    for source, mark in as_object(value).items():
        if not isinstance(mark, list) or len(mark) != 2:  # noqa: PLR2004 - epoch and sequence
            raise ValueError(f"expected epoch and sequence: mark={mark}")
        positions[SourceId(source)] = Position(as_number(mark[0]), as_number(mark[1]))
    return positions


def progress_from_summaries(summaries: Iterable[Mapping[str, str]]) -> Progress:
    """Rebuild a marker from the summaries of a table's snapshots; those of other writers say nothing.

    It has no watermarks: sources without them send their epoch again, and the table drops what it has.

    Raises: ProgressUnreadable if a summary is damaged.
    """
    progress = Progress()
    for summary in summaries:
        if SOURCES_KEY not in summary:
            continue
        try:
            spans = decode_object(summary[SOURCES_KEY])
            last = _from_pairs({source: [span[0], span[-1]] for source, span in spans.items()})
            log_to = int(summary.get(LOG_TO_KEY, 0))
        except (ValueError, LookupError, TypeError) as error:
            raise ProgressUnreadable(f"snapshot summary is damaged: {error}") from error
        progress = progress.advance(node=summary.get(NODE_KEY, ""), log_to=log_to, sources=last)
    return progress


def spans_to_text(spans: Mapping[SourceId, Span]) -> str:
    """Return what a flush covers, for its snapshot summary. A span lies within one epoch."""
    parts = {str(source): (s.first.epoch, s.first.sequence, s.last.sequence) for source, s in spans.items()}
    return encode(parts)


# -- strict JSON of properties and summaries. All readers raise ValueError for a text or value of another form.


def encode(document: Mapping[str, Any]) -> str:
    """Return a document as text: compact and with sorted names, so that equal documents are equal texts."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def decode_object(text: str) -> dict[str, Any]:
    """Return the document of a text."""
    try:
        return as_object(json.loads(text))
    except RecursionError as error:
        raise ValueError("too deep") from error


def as_object(value: Any) -> dict[str, Any]:
    """Return a value that has to be an object."""
    if not isinstance(value, dict):
        raise ValueError(f"expected an object: got={type(value).__name__}")  # noqa: TRY004 - as json.loads has it
    return value


def as_number(value: Any) -> int:
    """Return a value that has to be a whole number."""
    if type(value) is not int:
        raise ValueError(f"expected a whole number: got={type(value).__name__}")
    return value


def as_numbers(value: Any) -> dict[str, int]:
    """Return a value that has to be an object of whole numbers."""
    return {name: as_number(each) for name, each in as_object(value).items()}


def as_hex(value: Any) -> int:
    """Return the number of a text of hexadecimal digits."""
    if not isinstance(value, str):
        raise ValueError(f"expected hexadecimal digits: got={type(value).__name__}")  # noqa: TRY004
    return int(value, 16)


def member(document: Mapping[str, Any], name: str) -> Any:
    """Return a member that has to exist."""
    if name not in document:
        raise ValueError(f"lacks a member: name={name}")
    return document[name]
