"""Client of the Iceberg REST catalog: requests with their credentials, and what each response means.

For a commit:

    2xx                                     committed
    2xx with a body that is not JSON        CommitUnknown: for example the page of a proxy
    3xx                                     CatalogError: following it would turn the commit into a load
    404                                     TableMissing
    409                                     CommitConflict
    401, with OAuth2                        sent once more with a new token: the request had no effect
    401, 403                                CatalogError: our credentials are wrong, not the request
    429, connection refused                 CatalogUnavailable: the request had no effect
    any other 4xx                           CommitRefused: the table may differ from our state of it
    5xx, timeout, connection lost           CommitUnknown: it may have been committed

The Authorization header of a request:

    no credentials       no header
    a token              a constant header
    a client's secret    a token by OAuth2's client credentials grant (RFC 6749, section 4.4), renewed before it
                         expires, and when the catalog responds 401, because tokens can be revoked

One renewal runs at a time; concurrent requests wait for its token. Messages contain neither tokens nor secrets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from http import HTTPStatus
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
from lakefeed.writer.commit.plan import Request
from lakefeed.writer.config import IcebergConfig

NAMESPACE_SEPARATOR = "\x1f"  # %1F in a path, unless the catalog configures another
CONNECTIONS_MAX = 16  # commits of different tables at once; more would only queue in the catalog

# The response to a commit has the table's whole history, which is not read here. Compressing it would cost the catalog
# more time than the commit itself.
_BODY_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_MINIMAL_RESPONSE = {"Prefer": "return=minimal"}

_HEADER_KEY = "header."
_TRANSACTION_ENDPOINT = "POST /v1/{prefix}/transactions/commit"

_NOT_AUTHENTICATED = (HTTPStatus.UNAUTHORIZED, 419)  # Iceberg's own code for an expired token

# A token is renewed when this share of its lifetime has passed, so that it does not expire during a request.
_RENEW_AFTER_SHARE = 0.8
# For a token server that does not send a lifetime; the catalog's 401 corrects a wrong guess.
_LIFETIME_DEFAULT_S = 600.0
# Enough for an error message, and less than a page of HTML.
_ERROR_MAX_CHARS = 200


class Credentials:
    """The Authorization header: a constant token, or none."""

    def __init__(self, token: str = "") -> None:
        self._header = f"Bearer {token}" if token else None

    async def header(self) -> str | None:
        """Return the Authorization header, or None to send none.

        Raises: CatalogError, CatalogUnavailable.
        """
        return self._header

    async def renew(self, refused: str | None) -> bool:
        """Replace a header that the catalog refused; return whether there is a new one to try.

        Raises: CatalogError, CatalogUnavailable.
        """
        del refused
        return False


class OAuthCredentials(Credentials):
    """A token from a token server, reused during its lifetime. `credential` is `client-id:client-secret`."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        token_uri: str,
        credential: str,
        scope: str = "",
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        client_id, _, client_secret = credential.partition(":")
        self._form = {"grant_type": "client_credentials", "client_id": client_id, "client_secret": client_secret}
        if scope:
            self._form["scope"] = scope
        self._session = session
        self._token_uri = token_uri
        self._timeout_s = timeout_s
        self._clock = clock
        self._renewing = asyncio.Lock()
        self._renew_at = 0.0

    async def header(self) -> str | None:
        """Return the header, with a new token if the last one is about to expire."""
        if self._header is None or self._clock() >= self._renew_at:
            await self.renew(self._header)
        return self._header

    async def renew(self, refused: str | None) -> bool:
        """Fetch a token to replace the refused one, unless another request has done so meanwhile."""
        async with self._renewing:
            if self._header is None or self._header == refused:
                await self._fetch()
        return True

    async def _fetch(self) -> None:
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(
                    self._token_uri, data=self._form, headers={"Accept": "application/json"}
                ) as response,
            ):
                body = await response.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            raise CatalogUnavailable(f"token server did not answer: {reason}: url={self._token_uri}") from error
        self._accept(response.status, body)

    def _accept(self, status: int, response: bytes) -> None:
        facts = f"status={status} url={self._token_uri}"
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            raise CatalogUnavailable(f"token server failed: {facts}")
        try:
            body = orjson.loads(response)
        except orjson.JSONDecodeError:
            body = {}
        body = body if isinstance(body, dict) else {}
        if status >= HTTPStatus.BAD_REQUEST:
            raise CatalogError(f"token server refused the credential: {_error_of(body)}: {facts}")
        token = body.get("access_token")
        if not isinstance(token, str) or not token:
            raise CatalogError(f"token server responded without a token: {facts}")
        self._header = f"Bearer {token}"
        given_s = body.get("expires_in")
        lifetime_s = given_s if isinstance(given_s, int | float) and given_s > 0 else _LIFETIME_DEFAULT_S
        self._renew_at = self._clock() + _RENEW_AFTER_SHARE * lifetime_s


def _error_of(body: Mapping[str, Any]) -> str:
    """Return the server's own message. `error` is text in RFC 6749, an object in Iceberg's catalogs."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else body.get("error_description") or error
    return str(message or "no reason given")[:_ERROR_MAX_CHARS]


def parse_table(response: bytes) -> Mapping[str, Any]:
    """Return the metadata document in the response to a load, create or commit."""
    document: dict[str, Any] = orjson.loads(response)["metadata"]
    return document


def open_catalog(
    uri: str, *, warehouse: str = "", token: str = "", timeout_s: float = 30.0
) -> AbstractAsyncContextManager[CatalogClient]:
    """Open a client of the catalog at `uri` (without /v1)."""
    return open_foreign_catalog(IcebergConfig(uri=uri, warehouse=warehouse, token=token, request_timeout_s=timeout_s))


@asynccontextmanager
async def open_foreign_catalog(config: IcebergConfig) -> AsyncIterator[CatalogClient]:
    """Open a client of the catalog in the settings, with OAuth2 if a credential is set."""
    timeout_s = config.request_timeout_s
    connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX)
    async with aiohttp.ClientSession(connector=connector, headers=config.header_map()) as session:
        credentials = Credentials(config.token)
        if config.credential:
            credentials = OAuthCredentials(
                session,
                token_uri=config.oauth2_server_uri or f"{_versioned(config.uri)}/oauth/tokens",
                credential=config.credential,
                scope=config.scope,
                timeout_s=timeout_s,
            )
        yield CatalogClient(
            session, config.uri, credentials=credentials, warehouse=config.warehouse, timeout_s=timeout_s
        )


def _versioned(uri: str) -> str:
    return f"{uri.rstrip('/').removesuffix('/v1')}/v1"


class CatalogClient:
    """Requests to one catalog. Every method raises CatalogError or a subclass if the request fails."""

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
        """Load and apply the catalog's configuration; called once, before any other method."""
        query = {"warehouse": self._warehouse} if self._warehouse else {}
        body = orjson.loads(await self._send("GET", f"{self._base}/config", query=query))
        overrides = body.get("overrides") or {}
        config: dict[str, str] = {**(body.get("defaults") or {}), **overrides}
        # A prefix may have several segments and is not encoded in paths.
        self._prefix = config.get("prefix", "").strip("/")
        self._separator = unquote(config.get("namespace-separator", "")) or NAMESPACE_SEPARATOR
        self._headers = {
            name.removeprefix(_HEADER_KEY): value for name, value in config.items() if name.startswith(_HEADER_KEY)
        }
        if "uri" in overrides:  # the catalog moves clients to another address
            self._base = _versioned(overrides["uri"])
        if body.get("endpoints"):
            self._endpoints = frozenset(body["endpoints"])
        return config

    @property
    def has_transactions(self) -> bool:
        """Return whether several tables can be committed atomically; assumed if the catalog lists no endpoints."""
        return self._endpoints is None or _TRANSACTION_ENDPOINT in self._endpoints

    async def ensure_namespace(self, namespace: tuple[str, ...]) -> None:
        """Create a namespace and its parents, unless they exist."""
        for depth in range(1, len(namespace) + 1):
            try:
                await self._send("POST", self._url("namespaces"), body={"namespace": namespace[:depth]})
            except CommitConflict:
                continue
            except CatalogError as error:
                # A client that may not create namespaces may still write to existing ones.
                try:
                    await self.load_properties(namespace[:depth])
                except CatalogError:
                    raise error from None

    async def list_namespaces(self, parent: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        """List all namespaces, or all below one, at any depth."""
        query = {"parent": self._separator.join(parent)} if parent else {}
        found: list[tuple[str, ...]] = []
        async for page in self._pages(self._url("namespaces"), query):
            for namespace in map(tuple, page["namespaces"]):
                found += [namespace, *await self.list_namespaces(namespace)]
        return found

    async def list_tables(self, namespace: tuple[str, ...]) -> list[TableName]:
        """List the tables of a namespace."""
        pages = self._pages(self._url("namespaces", self._path(namespace), "tables"), {})
        return [
            TableName(tuple(item["namespace"]), item["name"]) async for page in pages for item in page["identifiers"]
        ]

    async def _pages(self, url: str, query: dict[str, str]) -> AsyncIterator[dict[str, Any]]:
        while True:
            page = orjson.loads(await self._send("GET", url, query=query))
            yield page
            if not (token := page.get("next-page-token")):
                return
            query = {**query, "pageToken": token}

    async def load_refs(self, name: TableName) -> Mapping[str, Any]:
        """Load a table's current metadata, with only those snapshots that a branch or a tag points at."""
        return parse_table(await self._send("GET", self._table_url(name), query={"snapshots": "refs"}))

    async def load_table(self, name: TableName) -> Mapping[str, Any]:
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
    ) -> Mapping[str, Any]:
        """Create a table. The catalog may assign other field ids than those of `schema`.

        Raises:
            CommitConflict: the table exists.
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

    async def commit_table(self, name: TableName, request: Request, *, needs_response: bool = True) -> bytes:
        """Commit to a table and return the response unparsed, because it grows with the table's history.

        Without `needs_response`, a catalog that supports RFC 7240, like ours, omits the history.
        """
        headers = {} if needs_response else _MINIMAL_RESPONSE
        return await self._send("POST", self._table_url(name), body=_change(name, request), headers=headers)

    async def commit_transaction(self, requests: Mapping[TableName, Request]) -> None:
        """Commit to several tables atomically."""
        changes = [_change(name, request) for name, request in requests.items()]
        await self._send("POST", self._url("transactions", "commit"), body={"table-changes": changes})

    async def load_properties(self, namespace: tuple[str, ...]) -> Mapping[str, str]:
        """Load the properties of a namespace."""
        body = orjson.loads(await self._send("GET", self._url("namespaces", self._path(namespace))))
        properties: dict[str, str] = body.get("properties") or {}
        return properties

    async def set_properties(self, namespace: tuple[str, ...], updates: Mapping[str, str]) -> None:
        """Set properties of a namespace; other properties keep their values."""
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
        """Send a request and return the response; if its token is refused, send it once more with a new token."""
        data = None if body is None else orjson.dumps(body)
        # The path is already encoded: aiohttp would decode %1F and %2F in it.
        target = URL(url, encoded=True).with_query(query or None)
        all_headers = {**self._headers, **({} if body is None else _BODY_HEADERS), **(headers or {})}
        for is_last in (False, True):
            authorization = await self._credentials.header()
            signed = {**all_headers, **({"Authorization": authorization} if authorization else {})}
            status, response = await self._exchange(method, target, data, signed)
            if is_last or status not in _NOT_AUTHENTICATED or not await self._credentials.renew(authorization):
                break
        if status >= HTTPStatus.BAD_REQUEST:
            raise _error_class(method, status)(f"{_message(response)}: status={status} method={method} url={url}")
        if response and not response.lstrip().startswith(b"{"):
            raise _lost_response_class(method)(f"response is not JSON: status={status} method={method} url={url}")
        return response

    async def _exchange(
        self, method: str, target: URL, data: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        facts = f"method={method} url={target}"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.request(method, target, data=data, headers=headers, allow_redirects=False) as response,
            ):
                if HTTPStatus.MULTIPLE_CHOICES <= response.status < HTTPStatus.BAD_REQUEST:
                    # Without the query, which may contain secrets.
                    location = response.headers.get("Location", "").partition("?")[0]
                    raise CatalogError(
                        "catalog redirects, set iceberg.uri to the address that it redirects to:"
                        f" location={location} status={response.status} {facts}"
                    )
                return response.status, await response.read()
        except aiohttp.ClientConnectorError as error:
            raise CatalogUnavailable(f"catalog cannot be reached: {error}: {facts}") from error
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or type(error).__name__
            raise _lost_response_class(method)(f"catalog did not answer: {reason}: {facts}") from error


def _change(name: TableName, request: Request) -> dict[str, Any]:
    return {
        "identifier": {"namespace": name.namespace, "name": name.name},
        "requirements": request.requirements,
        "updates": request.updates,
    }


def _lost_response_class(method: str) -> type[CatalogError]:
    """Return the error for a lost response. Only a write can have an unknown outcome."""
    return CatalogUnavailable if method == "GET" else CommitUnknown


def _error_class(method: str, status: int) -> type[CatalogError]:
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _lost_response_class(method)
    is_refused_commit = method != "GET" and status not in (*_NOT_AUTHENTICATED, HTTPStatus.FORBIDDEN)
    classes: dict[int, type[CatalogError]] = {
        HTTPStatus.NOT_FOUND: TableMissing,
        HTTPStatus.CONFLICT: CommitConflict,
        HTTPStatus.TOO_MANY_REQUESTS: CatalogUnavailable,
    }
    return classes.get(status, CommitRefused if is_refused_commit else CatalogError)


def _message(response: bytes) -> str:
    """Return the catalog's own message of an error, if it has one; the response may be a proxy's."""
    try:
        return str(orjson.loads(response)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "catalog refused"
