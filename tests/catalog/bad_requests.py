"""Requests that are wrong in random ways: valid ones with damaged paths, queries, headers and bodies.

Everything follows from the random generator that is passed in, and from what the catalog answered before.
"""

from __future__ import annotations

import copy
import json
import random
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tests.catalog.good_requests import BODIES, HEADERS, OPERATIONS, QUERIES, REQUIREMENTS, UPDATES, VIEW_UPDATES

HUGE_NUMBERS = (2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 1e308, 10**400, -1, 0)
# A zero byte, half a surrogate pair, the separator of levels, what is longer than a name, a blank, and no text at all.
STRANGE_TEXTS = (
    "",
    " ",
    "ü☃",
    "a\0b",
    "\ud800",
    "\udfff\ud800",
    "a\x1fb",
    "../x",
    "x" * 600,
    "ü" * 300,
    "9" * 5_000,
    "%",
)
STRANGE_VALUES: tuple[Any, ...] = (None, True, 0.5, [], {}, [[]], [None], {"": {"": None}}, float("nan"), float("inf"))
LONG_TEXT_CHARS = 100_000
# Stand-ins for values nested so deeply that Python cannot write them; orjson reads 1,024 levels.
DEEP = {"@deep-list": b"[" * 900 + b"]" * 900, "@deep-object": b'{"a":' * 1_500 + b"1" + b"}" * 1_500}

# As they stand in a path or query: also what no percent-encoding is, and what decodes to no UTF-8.
STRANGE_PARTS = (
    "%",
    "%0",
    "%zz",
    "%00",
    "%FF",
    "%ED%A0%80",
    "%F4%90%80%80",
    "%1F",
    "a%1F",
    "%2F",
    "..",
    "+",
    "%25",
    "~",
)
STRANGE_HEADERS = (
    "",
    ",",
    ";",
    '"',
    "*",
    'W/"',
    '"a", "b',
    "\xff\xfe",
    "\t",
    "q=0",
    "gzip;q=",
    "gzip, br;q=1.5",
    "x" * 4_000,
)
STRANGE_KEYS = ("0" * 36, "not-a-uuid", "{" + str(uuid.UUID(int=1)) + "}", str(uuid.UUID(int=1)).upper())
LARGE = (
    "POST namespaces/{namespace}/tables",
    "POST namespaces/{namespace}/tables/{table}",
    "POST namespaces/{namespace}/tables/{table}/plan",
    "POST namespaces/{namespace}/views/{view}",
    "POST transactions/commit",
)
ENCODINGS = ("gzip", "deflate", "br", "zstd", "none", "gzip, gzip")


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it goes over the wire; `operation` is what it began as."""

    operation: str
    target: str
    headers: dict[str, str]
    body: bytes | None

    @property
    def method(self) -> str:
        """Return the method."""
        return self.operation.partition(" ")[0]


class RequestFuzzer:
    """Makes requests. `known` has values for the places in paths and bodies that only the catalog can name."""

    def __init__(self, rng: random.Random, known: dict[str, str]) -> None:
        self._rng = rng
        self._known = known

    def make(self, operation: str, *, faults: int) -> Request:
        """Make a request with so many faults, each anywhere; with none it is a good one."""
        rng = self._rng
        path, query, headers = self._path(operation), dict(QUERIES.get(operation, {})), self._some_headers(faults)
        body = self._good_body(operation, faults)
        if faults and rng.random() < 0.5:
            query = {}
        raw_query = "&".join(f"{name}={quote(text)}" for name, text in query.items())
        for _ in range(faults):
            damaged = rng.choice(("path", "query", "headers", *("body",) * (4 if body is not None else 0)))
            if damaged == "path":
                path = self._damage_path(operation, path)
            elif damaged == "query":
                raw_query = self._damage_query(raw_query)
            elif damaged == "headers":
                headers |= self._damaged_header()
            else:
                body = damage(rng, body)
        raw_body = None if body is None else self._encode(body, faults)
        return Request(operation, f"/v1/{path}" + (f"?{raw_query}" if raw_query else ""), headers, raw_body)

    def _path(self, operation: str) -> str:
        known = {"namespace": "db", "table": "t", "view": "v", "function": "f", "plan-id": "none", **self._known}
        if operation == "DELETE namespaces/{namespace}":
            known["namespace"] = "empty"
        return re.sub(r"{([^}]+)}", lambda name: quote(known[name[1]], safe=""), operation.partition(" ")[2])

    def _good_body(self, operation: str, faults: int) -> Any:
        method, _, endpoint = operation.partition(" ")
        if method != "POST":
            return None
        body = copy.deepcopy(BODIES[endpoint])
        if "metadata-location" in body:
            body["metadata-location"] = self._known[endpoint.rpartition("/")[2]]
        # A commit is of updates of all kinds.
        if endpoint.endswith("/{table}"):
            body["requirements"] = self._some(REQUIREMENTS, min(faults, 1))
            body["updates"] = self._some(UPDATES, 4 if faults else 0)
        elif endpoint.endswith("/{view}"):
            body |= {"requirements": [], "updates": self._some(VIEW_UPDATES, 3 if faults else 0)}
        elif endpoint == "transactions/commit":
            body["table-changes"][0] |= {"requirements": [], "updates": self._some(UPDATES, 4 if faults else 0)}
        elif endpoint.endswith("/plan"):
            # One snapshot or the range between two, if not the current one.
            for name in ("snapshot-id", "start-snapshot-id", "end-snapshot-id"):
                if not faults or self._rng.random() < 0.7:
                    del body[name]
        return body

    def _some(self, items: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
        return copy.deepcopy(self._rng.sample(items, self._rng.randint(0, most)))

    def _some_headers(self, faults: int) -> dict[str, str]:
        headers = {name: HEADERS[name] for name in HEADERS if faults and self._rng.random() < 0.2}
        # A new key each time: a request under a known key is rejected before it is read.
        if "Idempotency-Key" in headers and self._rng.random() < 0.8:
            headers["Idempotency-Key"] = str(uuid.UUID(int=self._rng.getrandbits(128)))
        return headers

    def _damage_path(self, operation: str, path: str) -> str:
        parts = path.split("/")
        places = [at for at, part in enumerate(operation.partition(" ")[2].split("/")) if part.startswith("{")]
        if places:
            part = self._rng.choice((*STRANGE_PARTS, quote(self._text().encode(errors="surrogatepass"), safe="")))
            parts[self._rng.choice(places)] = part
        return "/".join(parts)

    def _damage_query(self, query: str) -> str:
        name = self._rng.choice(sorted({name for names in QUERIES.values() for name in names}))
        text = self._rng.choice((*STRANGE_PARTS, quote(self._text().encode(errors="surrogatepass")), "true", "0", "-1"))
        return f"{query}&{name}={text}" if query else f"{name}={text}"

    def _damaged_header(self) -> dict[str, str]:
        name = self._rng.choice(sorted(HEADERS))
        values = {"Idempotency-Key": STRANGE_KEYS, "Content-Encoding": ENCODINGS}.get(name, STRANGE_HEADERS)
        return {name: self._rng.choice(values)}

    def _text(self) -> str:
        return self._rng.choice(STRANGE_TEXTS)

    def _encode(self, body: Any, faults: int) -> bytes:
        raw = json.dumps(body).encode()
        for name, deep in DEEP.items():
            raw = raw.replace(f'"{name}"'.encode(), deep)
        if faults and self._rng.random() < 0.05:
            at = self._rng.randrange(len(raw) + 1)
            raw = raw[:at] + self._rng.choice((b"", b"\0", b"\xff", b"\xed\xa0\x80", b"[" * 3_000)) + raw[at + 1 :]
        return raw


def damage(rng: random.Random, document: Any) -> Any:
    """Damage one place of a document, which is changed."""
    places = list(_places(document))
    if not places:
        return copy.deepcopy(rng.choice(STRANGE_VALUES))
    container, key = rng.choice(places)
    rng.choice(_SPOILERS)(rng, container, key)
    return document


def _places(document: Any) -> Any:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield document, key
        yield from _places(value)


def _drop(_rng: random.Random, container: Any, key: Any) -> None:
    del container[key]


def _put_strange(rng: random.Random, container: Any, key: Any) -> None:
    container[key] = copy.deepcopy(rng.choice((*STRANGE_VALUES, *STRANGE_TEXTS)))


def _put_number(rng: random.Random, container: Any, key: Any) -> None:
    container[key] = rng.choice(HUGE_NUMBERS)


def _put_text(rng: random.Random, container: Any, key: Any) -> None:
    text = rng.choice((*STRANGE_TEXTS, "x" * LONG_TEXT_CHARS))
    container[key] = f"{container[key]}{text}" if isinstance(container[key], str) else text


def _nest(rng: random.Random, container: Any, key: Any) -> None:
    value = container[key]
    container[key] = rng.choice(([value], {"a": value}, [[{"a": value}]], *DEEP))


def _add(rng: random.Random, container: Any, key: Any) -> None:
    if isinstance(container, dict):
        container[rng.choice(STRANGE_TEXTS)] = copy.deepcopy(container[key])
    else:
        container.append(copy.deepcopy(container[key]))


_SPOILERS: tuple[Callable[[random.Random, Any, Any], None], ...] = (
    *(_drop, _put_strange, _put_strange, _put_number, _put_text),
    *(_nest, _add),
)


def choose_operation(rng: random.Random) -> str:
    """Choose an operation; those with large bodies, in which more can be wrong, more often."""
    return rng.choice((*OPERATIONS, *(f"POST {endpoint}" for endpoint in BODIES), *LARGE * 3))
