"""Opens the engines that read Lakefeed's tables, each as its users would: DuckDB and PyIceberg on the REST catalog.

DuckDB's extensions come from their PyPI packages, so nothing is downloaded while tests run.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import duckdb
from pyiceberg.catalog.rest import RestCatalog

# Each needs the ones before it.
_DUCKDB_EXTENSIONS = ("httpfs", "avro", "iceberg")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """How a client reaches the object store by itself, when the catalog does not tell it."""

    endpoint: str
    access_key_id: str
    secret_access_key: str
    region: str = "us-east-1"


def open_duckdb(
    catalog_url: str, *, warehouse: str = "", name: str = "lake", token: str = "", s3: S3Settings | None = None
) -> duckdb.DuckDBPyConnection:
    """Connect DuckDB with the catalog attached as `name`, the session's time zone UTC. The caller closes it."""
    connection = duckdb.connect()
    connection.execute("SET autoinstall_known_extensions = false; SET autoload_known_extensions = false")
    connection.execute("SET TimeZone = 'UTC'")
    for extension in _DUCKDB_EXTENSIONS:
        connection.execute(f"LOAD '{_duckdb_extension_file(extension)}'")
    if s3 is not None:
        connection.execute(_duckdb_s3_secret(s3))
    options = ["TYPE iceberg", f"ENDPOINT '{catalog_url}'"]
    if token:
        connection.execute(f"CREATE SECRET catalog_token (TYPE iceberg, TOKEN '{token}')")
        options.append("SECRET catalog_token")
    else:
        options.append("AUTHORIZATION_TYPE 'none'")
    if s3 is not None:
        # Otherwise DuckDB takes the endpoint that the catalog names as all there is to know, and signs with no keys.
        options.append("ACCESS_DELEGATION_MODE 'none'")
    connection.execute(f"ATTACH '{warehouse}' AS {name} ({', '.join(options)})")
    return connection


def _duckdb_s3_secret(s3: S3Settings) -> str:
    scheme, _, host = s3.endpoint.partition("://")
    return (
        f"CREATE SECRET store (TYPE s3, KEY_ID '{s3.access_key_id}', SECRET '{s3.secret_access_key}', "
        f"ENDPOINT '{host}', REGION '{s3.region}', URL_STYLE 'path', USE_SSL {scheme == 'https'})"
    )


def _duckdb_extension_file(extension: str) -> Path:
    package = importlib.util.find_spec(f"duckdb_extension_{extension}")
    assert package is not None
    assert package.origin is not None
    return next(Path(package.origin).parent.glob(f"extensions/v*/{extension}.duckdb_extension"))


def open_pyiceberg(
    catalog_url: str, *, warehouse: str = "", name: str = "lake", token: str = "", s3: S3Settings | None = None
) -> RestCatalog:
    """Open the catalog with PyIceberg. The caller closes it."""
    properties = {"uri": catalog_url}
    if warehouse:
        properties["warehouse"] = warehouse
    if token:
        properties["token"] = token
    if s3 is not None:
        properties |= {
            "s3.endpoint": s3.endpoint,
            "s3.access-key-id": s3.access_key_id,
            "s3.secret-access-key": s3.secret_access_key,
            "s3.region": s3.region,
            "s3.path-style-access": "true",
        }
    return RestCatalog(name, **properties)
