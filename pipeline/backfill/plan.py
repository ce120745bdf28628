"""Which chunks an input is read in. Owns the cuts, and how a later run finds out that they are the same.

A chunk is what is read and committed at once. Chunks are numbered, and a run that goes on after a crash has to cut as
the first one did: files are told by a fingerprint of their names and sizes, a database's table by the range of the keys
that were there at the start. The first and the last range are open, so that rows outside of it are not left out.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# More would make a plan that no driver can hold.
CHUNKS_MAX = 100_000

_FINGERPRINT_DIGITS = 16


@dataclass(frozen=True, slots=True, order=True)
class InputFile:
    """A file of the input."""

    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Files, or conditions in the database's SQL, each of which is read by one connection."""

    number: int
    files: Sequence[InputFile] = ()
    conditions: Sequence[str] = ()

    @property
    def shown(self) -> str:
        """Say what it is, for people."""
        if self.files:
            first = self.files[0].path.rsplit("/", 1)[-1]
            size = sum(file.size_bytes for file in self.files)
            return f"{len(self.files)} files from {first}, {size:,} bytes"
        return self.conditions[0] if len(self.conditions) == 1 else f"{self.conditions[0]} ... {self.conditions[-1]}"


@dataclass(frozen=True, slots=True)
class Plan:
    """All chunks, and the facts that they were cut by: another run with equal facts cuts equally."""

    chunks: Sequence[Chunk]
    facts: Mapping[str, Any]


def plan_files(files: Iterable[InputFile], *, chunk_max_bytes: int) -> Plan:
    """Put files together, in the order of their names; a larger one is a chunk of its own."""
    ordered = sorted(files)
    groups: list[list[InputFile]] = []
    size = 0
    for file in ordered:
        if not groups or size + file.size_bytes > chunk_max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size_bytes
    chunks = [Chunk(number, files=tuple(group)) for number, group in enumerate(groups)]
    # With the chunk's number, so that the same files cut elsewhere have other facts.
    lines = (f"{chunk.number} {file.path} {file.size_bytes}" for chunk in chunks for file in chunk.files)
    return Plan(chunks, {"files": fingerprint(lines), "cut": len(chunks)})


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A database's table by one of its columns, of whole numbers; without a column it is one chunk."""

    column: str = ""
    low: int = 0
    high: int = 0
    rows: int = 0

    def facts(self, *, chunk_max_rows: int, parallel_reads: int) -> dict[str, Any]:
        """Give what chunks are cut by."""
        chunks = min(max(1, -(-self.rows // chunk_max_rows)), CHUNKS_MAX, max(1, self.high - self.low + 1))
        return {
            "column": self.column,
            "low": self.low,
            "high": self.high,
            "cut": chunks if self.column else 1,
            "parallel": parallel_reads,
        }


def plan_range(facts: Mapping[str, Any]) -> Plan:
    """Cut a range of keys into chunks, and each of them into what one connection reads."""
    column, cut, parallel = str(facts["column"]), int(facts["cut"]), int(facts["parallel"])
    if not column:
        return Plan((Chunk(0, conditions=("1 = 1",)),), facts)
    low, high = int(facts["low"]), int(facts["high"])
    width = high - low + 1
    parts = min(parallel, width // cut or 1)
    conditions = _conditions(column, [low + width * number // (cut * parts) for number in range(1, cut * parts)])
    chunks = [Chunk(at, conditions=tuple(conditions[at * parts : (at + 1) * parts])) for at in range(cut)]
    return Plan(chunks, facts)


def _conditions(column: str, bounds: Sequence[int]) -> list[str]:
    """Part all rows at some bounds: each row meets one condition, those without a key the first."""
    if not bounds:
        return ["1 = 1"]
    inner = [f"{column} >= {low} AND {column} < {high}" for low, high in itertools.pairwise(bounds)]
    return [f"{column} < {bounds[0]} OR {column} IS NULL", *inner, f"{column} >= {bounds[-1]}"]


def fingerprint(lines: Iterable[str]) -> str:
    """Make a short name of some lines."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode(errors="surrogatepass") + b"\n")
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


def default_run(*, table: str, source: str, address: str) -> str:
    """Name a run by what it does: the same command again goes on with it."""
    return f"{source}-{fingerprint((table, source, address))}"
