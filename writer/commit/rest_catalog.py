"""The Iceberg REST catalog as the writer uses it. Owns requests and what each answer means; plans are commit_plan's.

What an answer means for a commit:

    2xx                                     committed
    2xx, and what follows is not JSON       CommitUnknown: a proxy's page, say
    3xx                                     CatalogError: if followed, a commit would become a load, and that is a 200
    404                                     TableMissing
    409                                     CommitConflict
    401, with OAuth2                        once more with a new token: nothing was taken up
    401, 403                                CatalogError: it is about us, not about the table
    429, connection refused                 CatalogUnavailable: nothing was taken up
    any other 4xx                           CommitRefused: the table may be another than we think
    5xx, timeout, connection lost           CommitUnknown: it may have committed
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
import orjson
from yarl import URL

from lakefeed.contract.changes import TableName
from lakefeed.contract.errors import (
    CatalogError,
    CatalogUnavailable,
    CommitConflict,
    CommitRefused,
    CommitUnknown,
    TableMissing,
)
from lakefeed.iceberg.layout import UNSORTED, PartitionSpec, SortOrder, order_to_json, spec_to_json
from lakefeed.iceberg.types import Schema, schema_to_json
from lakefeed.writer.commit.oauth import Credentials, FixedToken, OAuthClient, OAuthToken
from lakefeed.writer.commit.plan import Request
from lakefeed.writer.config import IcebergConfig

NAMESPACE_SEPARATOR = "\x1f"  # %1F in a path, unless the catalog asks for another
CONNECTIONS_MAX = 16  # commits of different tables at once; more would only queue in the catalog

# The answer to a commit is the table's whole history, which is not read here: packing it would cost the catalog more
# time than the commit itself.
_BODY_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_MINIMAL_ANSWER = {"Prefer": "return=minimal"}

_HEADER_KEY = "header."
_TRANSACTION_ENDPOINT = "POST /v1/{prefix}/transactions/commit"

_NOT_AUTHENTICATED = (401, 419)  # the second is Iceberg's own, for a token that has expired
_NOT_ALLOWED = 403
_NOT_FOUND = 404
_CONFLICT = 409
_TOO_MANY_REQUESTS = 429
_FIRST_SERVER_ERROR = 500
_FIRST_ERROR = 400
_FIRST_REDIRECT = 300


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
    async with _open_session({}) as session:
        yield CatalogClient(session, uri, credentials=FixedToken(token), warehouse=warehouse, timeout_s=timeout_s)


@asynccontextmanager
async def open_foreign_catalog(config: IcebergConfig) -> AsyncIterator[CatalogClient]:
    """Connect to the catalog that the settings name, and close the connections at the end."""
    timeout_s = config.request_timeout_s
    async with _open_session(config.header_map()) as session:
        credentials: Credentials = FixedToken(config.token)
        if config.credential:
            credentials = OAuthToken(session, _oauth_client(config), timeout_s=timeout_s)
        yield CatalogClient(
            session, config.uri, credentials=credentials, warehouse=config.warehouse, timeout_s=timeout_s
        )


def _open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS_MAX), headers=headers)


def _oauth_client(config: IcebergConfig) -> OAuthClient:
    client_id, _, client_secret = config.credential.partition(":")
    return OAuthClient(
        token_uri=config.oauth2_server_uri or f"{_versioned(config.uri)}/oauth/tokens",
        client_id=client_id,
        client_secret=client_secret,
        scope=config.scope,
    )


def _versioned(uri: str) -> str:
    return f"{uri.rstrip('/').removesuffix('/v1')}/v1"


class CatalogClient:
    """Requests to one catalog. Every method raises CatalogError, or one of its kinds, when it is not answered well."""

    def __init__(
        self, session: aiohttp.ClientSession, uri: str, *, credentials: Credentials, warehouse: str, timeout_s: float
    ) -> None:
        self._session = session
        self._credentials = credentials
        self._base = _versioned(uri)
        self._warehouse = warehouse
        self._timeout_s = timeout_s
        self._prefix = ""
        self._separator = NAMESPACE_SEPARATOR
        self._headers: Mapping[str, str] = {}
        self._endpoints: frozenset[str] | None = None

    async def load_config(self) -> Mapping[str, str]:
        """Ask how the catalog wants to be used, and keep to it; called once, before anything else."""
        query = {"warehouse": self._warehouse} if self._warehouse else {}
        answer = orjson.loads(await self._send("GET", f"{self._base}/config", query=query))
        overrides = answer.get("overrides") or {}
        config: dict[str, str] = {**(answer.get("defaults") or {}), **overrides}
        # A prefix may have several segments and goes into paths as it is.
        self._prefix = config.get("prefix", "").strip("/")
        self._separator = unquote(config.get("namespace-separator", "")) or NAMESPACE_SEPARATOR
        self._headers = {
            name.removeprefix(_HEADER_KEY): value for name, value in config.items() if name.startswith(_HEADER_KEY)
        }
        if "uri" in overrides:  # the catalog's way to send clients to another address
            self._base = _versioned(overrides["uri"])
        if answer.get("endpoints"):
            self._endpoints = frozenset(answer["endpoints"])
        return config

    @property
    def has_transactions(self) -> bool:
        """Tell whether several tables can be committed at once; a catalog that lists nothing is taken to have all."""
        return self._endpoints is None or _TRANSACTION_ENDPOINT in self._endpoints

    async def ensure_namespace(self, namespace: tuple[str, ...]) -> None:
        """Create a namespace and those above it, unless they are there."""
        for depth in range(1, len(namespace) + 1):
            try:
                await self._send("POST", self._url("namespaces"), body={"namespace": namespace[:depth]})
            except CommitConflict:
                continue
            except CatalogError:
                # Whoever may not create namespaces may still write to those that are there.
                if not await self._has_namespace(namespace[:depth]):
                    raise

    async def _has_namespace(self, namespace: tuple[str, ...]) -> bool:
        try:
            await self._send("GET", self._url("namespaces", self._path(namespace)))
        except CatalogError:
            return False
        return True

    async def list_namespaces(self, parent: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        """Name all namespaces, or all below one, however deep."""
        query = {"parent": self._separator.join(parent)} if parent else {}
        found: list[tuple[str, ...]] = []
        while True:
            answer = orjson.loads(await self._send("GET", self._url("namespaces"), query=query))
            for namespace in map(tuple, answer["namespaces"]):
                found += [namespace, *await self.list_namespaces(namespace)]
            if not (token := answer.get("next-page-token")):
                return found
            query["pageToken"] = token

    async def list_tables(self, namespace: tuple[str, ...]) -> list[TableName]:
        """Name the tables of a namespace."""
        url = self._url("namespaces", self._path(namespace), "tables")
        query: dict[str, str] = {}
        found: list[TableName] = []
        while True:
            answer = orjson.loads(await self._send("GET", url, query=query))
            found += [TableName(tuple(item["namespace"]), item["name"]) for item in answer["identifiers"]]
            if not (token := answer.get("next-page-token")):
                return found
            query["pageToken"] = token

    async def load_table_properties(self, name: TableName) -> Mapping[str, str]:
        """Load a table's properties, without asking for its history."""
        properties: dict[str, str] = (await self.load_refs(name)).document.get("properties") or {}
        return properties

    async def load_refs(self, name: TableName) -> LoadedTable:
        """Load a table's current metadata with those snapshots only that a branch or a tag points at."""
        return parse_table(await self._send("GET", self._table_url(name), query={"snapshots": "refs"}))

    async def load_table(self, name: TableName) -> LoadedTable:
        """Load a table's current metadata."""
        return parse_table(await self._send("GET", self._table_url(name)))

    async def create_table(
        self,
        name: TableName,
        *,
        schema: Schema,
        spec: PartitionSpec,
        properties: Mapping[str, str],
        order: SortOrder = UNSORTED,
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
            "write-order": order_to_json(order),
            "properties": dict(properties),
        }
        return parse_table(
            await self._send("POST", self._url("namespaces", self._path(name.namespace), "tables"), body=body)
        )

    async def commit_table(self, name: TableName, request: Request, *, needs_answer: bool = True) -> bytes:
        """Commit; the answer is left unparsed.

        It grows with the table's history. Whoever does not need it says so, and a catalog that knows RFC 7240, as ours
        does, then leaves the history out.
        """
        headers = {} if needs_answer else _MINIMAL_ANSWER
        return await self._send("POST", self._table_url(name), body=_change(name, request), headers=headers)

    async def commit_transaction(self, requests: Mapping[TableName, Request]) -> None:
        """Commit to several tables at once: all or none."""
        changes = [_change(name, request) for name, request in requests.items()]
        await self._send("POST", self._url("transactions", "commit"), body={"table-changes": changes})

    async def load_properties(self, namespace: tuple[str, ...]) -> Mapping[str, str]:
        """Load the properties of a namespace."""
        answer = orjson.loads(await self._send("GET", self._url("namespaces", self._path(namespace))))
        properties: dict[str, str] = answer.get("properties") or {}
        return properties

    async def set_properties(self, namespace: tuple[str, ...], updates: Mapping[str, str]) -> None:
        """Set properties of a namespace; others stay."""
        url = self._url("namespaces", self._path(namespace), "properties")
        await self._send("POST", url, body={"updates": dict(updates), "removals": []})

    def _url(self, *segments: str) -> str:
        return "/".join((self._base, *([self._prefix] if self._prefix else []), *segments))

    def _path(self, namespace: tuple[str, ...]) -> str:
        return quote(self._separator.join(namespace), safe="")

    def _table_url(self, name: TableName) -> str:
        return self._url("namespaces", self._path(name.namespace), "tables", quote(name.name, safe=""))

    async def _send(
        self,
        method: str,
        url: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send a request; one that is refused for its token is sent once more with a new one."""
        data = None if body is None else orjson.dumps(body)
        # The path is encoded by us: aiohttp would decode %1F and %2F in it.
        target = URL(url, encoded=True).with_query(query or None)
        every = {**self._headers, **({} if body is None else _BODY_HEADERS), **(headers or {})}
        authorization = await self._credentials.header()
        status, answer = await self._exchange(method, target, data=data, headers=_signed(every, authorization))
        if status in _NOT_AUTHENTICATED and await self._credentials.renew(authorization):
            authorization = await self._credentials.header()
            status, answer = await self._exchange(method, target, data=data, headers=_signed(every, authorization))
        if status >= _FIRST_ERROR:
            raise _refusal(method, status)(f"{_message(answer)}: status={status} method={method} url={url}")
        if answer and not answer.lstrip().startswith(b"{"):
            raise _unknown_to(method)(f"answer is not JSON: status={status} method={method} url={url}")
        return answer

    async def _exchange(
        self, method: str, target: URL, *, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        facts = f"method={method} url={target}"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.request(method, target, data=data, headers=headers, allow_redirects=False) as response,
            ):
                if _FIRST_REDIRECT <= response.status < _FIRST_ERROR:
                    raise CatalogError(f"catalog redirects: {_redirection(response)} {facts}")
                return response.status, await response.read()
        except aiohttp.ClientConnectorError as error:
            raise CatalogUnavailable(f"catalog cannot be reached: {error}: {facts}") from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            raise _unknown_to(method)(f"catalog did not answer: {reason}: {facts}") from error


def _redirection(response: aiohttp.ClientResponse) -> str:
    """Tell where a redirect leads, without the query, in which secrets may stand."""
    location = response.headers.get("Location", "").partition("?")[0]
    return f"give iceberg.uri as it leads to: location={location} status={response.status}"


def _change(name: TableName, request: Request) -> dict[str, Any]:
    return {
        "identifier": {"namespace": name.namespace, "name": name.name},
        "requirements": request.requirements,
        "updates": request.updates,
    }


def _signed(headers: Mapping[str, str], authorization: str | None) -> dict[str, str]:
    return {**headers, "Authorization": authorization} if authorization else dict(headers)


def _unknown_to(method: str) -> type[CatalogError]:
    """Tell what a lost answer means: reading has no outcome to be unsure of."""
    return CatalogUnavailable if method == "GET" else CommitUnknown


def _refusal(method: str, status: int) -> type[CatalogError]:
    if status >= _FIRST_SERVER_ERROR:
        return _unknown_to(method)
    is_about_us = method == "GET" or status in (*_NOT_AUTHENTICATED, _NOT_ALLOWED)
    return {_NOT_FOUND: TableMissing, _CONFLICT: CommitConflict, _TOO_MANY_REQUESTS: CatalogUnavailable}.get(
        status, CatalogError if is_about_us else CommitRefused
    )


def _message(answer: bytes) -> str:
    """Find the catalog's own words in an error; proxies answer with anything."""
    try:
        return str(orjson.loads(answer)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "catalog refused"
