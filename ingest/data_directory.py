"""The directory that everything of one node lies in. Owns what is where, and the node's name."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from ingest.config import Config
from writer.config import CLOUD_SCHEMES


def make_data_dir(config: Config) -> Path:
    """Make the directory that everything of this node lies in."""
    data_dir = Path(config.server.data_dir).resolve()
    data_dir.mkdir(parents=True, exist_ok=True)
    return data_dir


def warehouse_location(config: Config, data_dir: Path) -> str:
    """Name the warehouse as the URI that tables are placed under."""
    given = config.storage.warehouse
    scheme, _, rest = given.partition("://")
    if scheme in {"s3a", "s3n"}:  # Hadoop's names for the same
        return f"s3://{rest.rstrip('/')}"
    if given.startswith(("s3://", "file:///", *CLOUD_SCHEMES)):
        return given.rstrip("/")
    return f"file://{Path(given).resolve() if given else data_dir / 'warehouse'}"


def load_node_id(data_dir: Path) -> str:
    """Read this node's name, making one at the first start: markers in tables must find it again."""
    path = data_dir / "node-id"
    if not path.exists():
        partial = path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(f"node-{uuid.uuid4()}\n")
            file.flush()
            os.fsync(file.fileno())  # an empty name after a power loss would be one that nobody has
        partial.replace(path)
    return path.read_text(encoding="utf-8").strip()
