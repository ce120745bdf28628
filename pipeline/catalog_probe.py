"""Whether the catalog answers, asked before Spark starts. Owns that one request.

Spark takes seconds to start, and then says in pages of Java frames that nobody listens at an address.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from http import HTTPStatus

from pipeline.config import CatalogConfig
from pipeline.errors import CatalogUnavailable

_TIMEOUT_S = 10.0


def check_catalog_answers(catalog: CatalogConfig) -> None:
    """Check that an Iceberg REST catalog is at the address and takes the token.

    Raises: CatalogUnavailable.
    """
    request = urllib.request.Request(_config_url(catalog))  # noqa: S310 - CatalogConfig takes http and https only
    if catalog.token:
        request.add_header("Authorization", f"Bearer {catalog.token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            document = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        error.close()
        raise _refused(catalog, error.code) from error
    except ValueError as error:
        raise CatalogUnavailable(f"not an Iceberg REST catalog: url={catalog.uri}") from error
    except OSError as error:
        raise CatalogUnavailable(
            f"cannot reach the catalog, is `lakefeed serve` running? url={catalog.uri} error={error}"
        ) from error
    if not isinstance(document, dict) or "defaults" not in document:
        raise CatalogUnavailable(f"not an Iceberg REST catalog: url={catalog.uri}")


def _config_url(catalog: CatalogConfig) -> str:
    query = f"?{urllib.parse.urlencode({'warehouse': catalog.warehouse})}" if catalog.warehouse else ""
    return f"{catalog.uri}/v1/config{query}"


def _refused(catalog: CatalogConfig, status: int) -> CatalogUnavailable:
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return CatalogUnavailable(f"the catalog refuses the token, give --token or LAKEFEED_TOKEN: url={catalog.uri}")
    if catalog.warehouse and status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND):
        return CatalogUnavailable(f"the catalog has no such warehouse: url={catalog.uri} warehouse={catalog.warehouse}")
    return CatalogUnavailable(f"the catalog does not answer as one: url={catalog.uri} status={status}")
