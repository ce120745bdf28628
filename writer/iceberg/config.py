"""Settings of the catalog that the writer commits to. Owns defaults, units and their checks.

Each field's `why` is shown by `lakefeed config` and in docs/configuration.md, so it is written for an operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from writer.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergConfig:
    """An Iceberg REST catalog elsewhere; without a uri, the one that this service serves."""

    uri: str = field(
        default="",
        metadata={
            "why": "REST catalog to commit to, before /v1; empty means the one served here, else that one is off"
        },
    )
    warehouse: str = field(default="", metadata={"why": "the catalog's name for the warehouse; some have only one"})
    token: str = field(default="", repr=False, metadata={"why": "bearer token for the catalog at uri", "secret": True})
    credential: str = field(
        default="",
        repr=False,
        metadata={"why": "OAuth2 client, as `client-id:client-secret`; tokens are fetched and renewed", "secret": True},
    )
    oauth2_server_uri: str = field(
        default="", metadata={"why": "where tokens are fetched; empty means the catalog's own v1/oauth/tokens"}
    )
    scope: str = field(
        default="catalog", metadata={"why": "OAuth2 scope asked for; Polaris wants `PRINCIPAL_ROLE:ALL`; may be empty"}
    )
    headers: str = field(
        default="",
        repr=False,
        metadata={"why": "further headers of every request, as `X-Realm: lake; X-Team: data`", "secret": True},
    )
    request_timeout_s: float = field(
        default=30.0,
        metadata={"why": "one request to the catalog; a commit without answer is looked up before a retry"},
    )

    def __post_init__(self) -> None:
        for name in ("uri", "oauth2_server_uri"):
            uri = getattr(self, name)
            check(not uri or uri.startswith(("http://", "https://")), f"{name} must start with http:// or https://")
        check(not (self.token and self.credential), "token and credential exclude each other")
        client_id, colon, secret = self.credential.partition(":")
        check(not self.credential or bool(client_id and colon and secret), "credential must be client-id:client-secret")
        needs_uri = any((self.token, self.credential, self.warehouse, self.headers))
        check(bool(self.uri) or not needs_uri, "uri must be set with token, credential, warehouse or headers")
        check(self.request_timeout_s > 0, "request_timeout_s must be positive")
        self.header_map()

    def header_map(self) -> Mapping[str, str]:
        """Read the further headers."""
        parts = [part.strip() for part in self.headers.split(";") if part.strip()]
        pairs = [part.partition(":") for part in parts]
        # The value may be a secret, so that it is not shown.
        check(all(colon and name.strip() for name, colon, _ in pairs), "headers must be `Name: value; Name: value`")
        return {name.strip(): value.strip() for name, _, value in pairs}
