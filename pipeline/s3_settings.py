"""How Spark reaches S3: what the service's own settings say of it, as Iceberg and Hadoop name it. Owns the names.

A catalog tells its clients the endpoint and the region with each table, and some also hand out keys. Ours does not:
whoever may read a table's metadata need not be given the keys of the store. So the keys come from the same file and the
same variables that the service reads, [storage] and LAKEFEED_STORAGE_S3_..., or else from the AWS credential chain.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.settings import read_file

# As the service has it, which tells it to others.
DEFAULT_REGION = "us-east-1"

_SECTION = "storage"
_VARIABLE_PREFIX = "LAKEFEED_STORAGE_"

# Setting of ours -> of Iceberg's S3FileIO, and of Hadoop's S3A, which Spark keeps checkpoints with.
_NAMES = {
    "s3_endpoint": ("s3.endpoint", "fs.s3a.endpoint"),
    "s3_region": ("client.region", "fs.s3a.endpoint.region"),
    "s3_path_style": ("s3.path-style-access", "fs.s3a.path.style.access"),
    "s3_access_key_id": ("s3.access-key-id", "fs.s3a.access.key"),
    "s3_secret_access_key": ("s3.secret-access-key", "fs.s3a.secret.key"),
    "s3_session_token": ("s3.session-token", "fs.s3a.session.token"),
}

# Keys that come with a session token are of another kind, which S3A has to be told.
_TEMPORARY_KEYS = "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider"


def load_s3_settings(path: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Read what the service's settings say of S3; empty where its files are elsewhere or AWS's own chain is used.

    Raises: ConfigError.
    """
    section = read_file(path)[1].get(_SECTION, {})
    in_file = section if isinstance(section, Mapping) else {}
    found = {name: environ.get(f"{_VARIABLE_PREFIX}{name.upper()}", in_file.get(name, "")) for name in _NAMES}
    given = {name: _as_text(value) for name, value in found.items() if value not in ("", False, "false")}
    # Java's client asks the machine for a region where it is told none, and ends if that knows none either.
    return {"s3_region": DEFAULT_REGION, **given} if given else {}


def catalog_properties(s3: Mapping[str, str]) -> dict[str, str]:
    """Name the settings as properties of an Iceberg catalog."""
    return {_NAMES[name][0]: value for name, value in s3.items()}


def hadoop_conf(s3: Mapping[str, str]) -> dict[str, str]:
    """Name the settings as Spark passes them on to Hadoop."""
    conf = {f"spark.hadoop.{_NAMES[name][1]}": value for name, value in s3.items()}
    if "s3_session_token" in s3:
        conf["spark.hadoop.fs.s3a.aws.credentials.provider"] = _TEMPORARY_KEYS
    return conf


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
