"""The Iceberg REST catalog as the writer uses it. Owns requests and what each answer means; plans are commit_plan's.

What an answer means for a commit:

    2xx                                     committed
    404                                     TableMissing
    409                                     CommitConflict
    429, connection refused                 CatalogUnavailable: nothing was taken up
    5xx, timeout, connection lost           CommitUnknown: it may have committed
    any other                               CatalogError
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from writer.changes import TableName
from writer.commit_plan import Request
from writer.errors import CatalogError, CatalogUnavailable, CommitConflict, CommitUnknown, TableMissing
from writer.iceberg.partitions import PartitionSpec, spec_to_json
from writer.types import Schema, schema_to_json

NAMESPACE_SEPARATOR = "\x1f"  # fixed by the specification; %1F in a path
CONNECTIONS_MAX = 16  # commits of different tables at once; more would only queue in the catalog

# The answer to a commit is the table's whole history, which is not read here: packing it would cost the catalog more
# time than the commit itself.
_BODY_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}

_NOT_FOUND = 404
_CONFLICT = 409
_TOO_MANY_REQUESTS = 429
_FIRST_SERVER_ERROR = 500
_FIRST_ERROR = 400


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """A table's metadata document, and where the catalog keeps it."""

    document: Mapping[str, Any]
    metadata_location: str | None
    config: Mapping[str, str]


def parse_table(answer: bytes) -> LoadedTable:
    """Read the answer to a load, a create or a commit."""
    body = orjson.loads(answer)
    return LoadedTable(body["metadata"], body.get("metadata-location"), body.get("config") or {})


@asynccontextmanager
async def open_catalog(
    uri: str, *, warehouse: str = "", token: str = "", timeout_s: float = 30.0
) -> AsyncIterator[CatalogClient]:
    """Connect to the catalog at `uri` (which ends before /v1), and close the connections at the end."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        yield CatalogClient(session, uri, warehouse=warehouse, timeout_s=timeout_s)


class CatalogClient:
    """Requests to one catalog. Every method raises CatalogError, or one of its kinds, when it is not answered well."""

    def __init__(self, session: aiohttp.ClientSession, uri: str, *, warehouse: str, timeout_s: float) -> None:
        self._session = session
        self._base = f"{uri.rstrip('/').removesuffix('/v1')}/v1"
        self._warehouse = warehouse
        self._timeout_s = timeout_s
        self._prefix = ""

    async def load_config(self) -> Mapping[str, str]:
        """Ask how the catalog wants to be used, and keep to it; called once, before anything else."""
        query = {"warehouse": self._warehouse} if self._warehouse else {}
        answer = orjson.loads(await self._send("GET", f"{self._base}/config", query=query))
        config: dict[str, str] = {**(answer.get("defaults") or {}), **(answer.get("overrides") or {})}
        # A prefix may have several segments and goes into paths as it is.
        self._prefix = config.get("prefix", "").strip("/")
        return config

    async def ensure_namespace(self, namespace: tuple[str, ...]) -> None:
        """Create a namespace and those above it, unless they are there."""
        for depth in range(1, len(namespace) + 1):
            try:
                await self._send("POST", self._url("namespaces"), body={"namespace": namespace[:depth]})
            except CommitConflict:
                continue

    async def load_table(self, name: TableName) -> LoadedTable:
        """Load a table's current metadata."""
        return parse_table(await self._send("GET", self._table_url(name)))

    async def create_table(
        self, name: TableName, *, schema: Schema, spec: PartitionSpec, properties: Mapping[str, str]
    ) -> LoadedTable:
        """Create a table. The catalog may give its columns other field ids than `schema` has.

        Raises:
            CommitConflict: there is one already.
            CommitUnknown: it may have been created.
        """
        body = {
            "name": name.name,
            "schema": schema_to_json(schema),
            "partition-spec": spec_to_json(spec),
            "properties": dict(properties),
        }
        return parse_table(
            await self._send("POST", self._url("namespaces", _path(name.namespace), "tables"), body=body)
        )

    async def commit_table(self, name: TableName, request: Request) -> bytes:
        """Commit; the answer is left unparsed, because it grows with the table's history and is rarely needed."""
        body = {
            "identifier": {"namespace": name.namespace, "name": name.name},
            "requirements": request.requirements,
            "updates": request.updates,
        }
        return await self._send("POST", self._table_url(name), body=body)

    def _url(self, *segments: str) -> str:
        return "/".join((self._base, *([self._prefix] if self._prefix else []), *segments))

    def _table_url(self, name: TableName) -> str:
        return self._url("namespaces", _path(name.namespace), "tables", quote(name.name, safe=""))

    async def _send(
        self, method: str, url: str, *, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
    ) -> bytes:
        facts = f"method={method} url={url}"
        try:
            async with asyncio.timeout(self._timeout_s), self._request(method, url, body, query) as response:
                answer = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise CatalogUnavailable(f"catalog cannot be reached: {error}: {facts}") from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            raise _unknown_to(method)(f"catalog did not answer: {reason}: {facts}") from error
        if response.status >= _FIRST_ERROR:
            raise _refusal(method, response.status)(f"{_message(answer)}: status={response.status} {facts}")
        return answer

    def _request(
        self, method: str, url: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        # The path is encoded by us: aiohttp would decode %1F and %2F in it.
        target = URL(url, encoded=True).with_query(query or None)
        data = None if body is None else orjson.dumps(body)
        headers = {} if body is None else _BODY_HEADERS
        return self._session.request(method, target, data=data, headers=headers)


def _path(namespace: tuple[str, ...]) -> str:
    return quote(NAMESPACE_SEPARATOR.join(namespace), safe="")


def _unknown_to(method: str) -> type[CatalogError]:
    """Tell what a lost answer means: reading has no outcome to be unsure of."""
    return CatalogUnavailable if method == "GET" else CommitUnknown


def _refusal(method: str, status: int) -> type[CatalogError]:
    if status >= _FIRST_SERVER_ERROR:
        return _unknown_to(method)
    return {_NOT_FOUND: TableMissing, _CONFLICT: CommitConflict, _TOO_MANY_REQUESTS: CatalogUnavailable}.get(
        status, CatalogError
    )


def _message(answer: bytes) -> str:
    """Find the catalog's own words in an error; proxies answer with anything."""
    try:
        return str(orjson.loads(answer)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "catalog refused"
