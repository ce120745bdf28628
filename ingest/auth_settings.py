"""Settings of authentication. Owns where tokens come from; who may come in is decided in auth.py."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ingest.auth import Auth, auth_from, check_token
from ingest.errors import ConfigError

# Clients of the command line find their token here; it is no setting of the service.
CLIENT_TOKEN_VARIABLE = "LAKEFEED_TOKEN"  # noqa: S105 - the name of a variable, not what is in it


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """Who may come in."""

    tokens: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={
            "why": "bearer tokens, at least 16 characters each; any one opens /ws, HTTP and the catalog; none = open",
            "secret": True,
        },
    )
    tokens_file: str = field(
        default="", metadata={"why": "further tokens, one a line, read at the start; # begins a comment line"}
    )

    def __post_init__(self) -> None:
        for number, token in enumerate(self.tokens, start=1):
            try:
                check_token(token, number)
            except ValueError as error:
                raise ValueError(f"tokens: {error}") from None


def load_tokens(config: AuthConfig) -> tuple[str, ...]:
    """Gather the tokens from the settings and the file.

    Raises: ConfigError. A file without tokens is an error: whoever named one wants the doors shut.
    """
    if not config.tokens_file:
        return config.tokens
    try:
        lines = Path(config.tokens_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"auth.tokens_file cannot be read: file={config.tokens_file} error={error}") from error
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise ConfigError(f"auth.tokens_file has no token in it: file={config.tokens_file}")
    try:
        auth_from(found)
    except ValueError as error:
        raise ConfigError(f"auth.tokens_file: {error}") from None
    return (*config.tokens, *found)


def build_auth(tokens: Iterable[str], *, own_token: str) -> Auth:
    """Build the decision; `own_token` lets the service's own catalog client in, once tokens are asked for at all."""
    tokens = tuple(tokens)
    return auth_from((*tokens, own_token)) if tokens else Auth()


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
