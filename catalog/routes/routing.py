"""How routes are written down and what handlers share. Owns the form of an endpoint in the config answer.

One list of routes both registers the handlers and is advertised, so the two cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from aiohttp import web

from catalog.answers import LoadAnswers
from catalog.config import CatalogConfig, Warehouse
from catalog.idempotency import Idempotency
from catalog.namespaces import Namespaces
from catalog.planning.planner import Planner
from catalog.store.claims import Outcome
from catalog.tables import Tables
from catalog.transactions import Transactions
from catalog.views import Views

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Retell: TypeAlias = Callable[[web.Request, Outcome], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One operation; `path` is spelled as in the specification, below `/v1/{prefix}/`.

    One that changes something has `retell`, which answers the same request once more from what it came to.
    """

    method: str
    path: str
    handler: Handler
    retell: Retell | None = None

    @property
    def endpoint(self) -> str:
        """Spell the route as clients look for it: with a literal `{prefix}`, though this catalog uses none."""
        return f"{self.method} /v1/{{prefix}}/{self.path}"

    @property
    def pattern(self) -> str:
        """Spell the route for aiohttp, whose own placeholders would not match braces in names nor have hyphens."""
        return "/" + re.sub(r"{([^}]+)}", lambda name: f"{{{name[1].replace('-', '_')}:[^/]+}}", self.path)


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers work with."""

    config: CatalogConfig
    warehouse: Warehouse
    namespaces: Namespaces
    tables: Tables
    views: Views
    transactions: Transactions
    answers: LoadAnswers
    idempotency: Idempotency
    planner: Planner
    endpoints: tuple[str, ...]


SERVICES = web.AppKey("services", Services)


def services(request: web.Request) -> Services:
    """Return the services of the application that a request reached."""
    return request.app[SERVICES]
