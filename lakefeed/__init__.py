"""Lakefeed: changes of databases into Apache Iceberg tables, exactly once.

What programs may import stands in `__all__`; everything else is internal and may change with any version.

    from lakefeed import SessionConfig, build_session, follow

Names are imported when they are first used: `import lakefeed` loads neither pyarrow nor PySpark.

Layers, from the top; imports go down only:

    ingest                       clients -> log; builds and runs the service; commands
    writer | catalog | pipeline  log -> snapshots | names -> metadata | tables -> tables, with Spark
    storage | iceberg            object stores | the table format
    aio | locations | logs       building blocks
    settings | backoff           sections from file, environment and flags | pauses between attempts
    contract                     what tables record, for writer and Spark; errors
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lakefeed.pipeline.consumers.registry import follow, hold
    from lakefeed.pipeline.spark.session import JobKind, SessionConfig, build_session, stop_session

    __version__: str

__all__ = [
    "JobKind",
    "SessionConfig",
    "__version__",
    "build_session",
    "follow",
    "hold",
    "stop_session",
]

_HOMES = {
    "JobKind": "lakefeed.pipeline.spark.session",
    "SessionConfig": "lakefeed.pipeline.spark.session",
    "build_session": "lakefeed.pipeline.spark.session",
    "follow": "lakefeed.pipeline.consumers.registry",
    "hold": "lakefeed.pipeline.consumers.registry",
    "stop_session": "lakefeed.pipeline.spark.session",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - slow to import, rarely asked for

        value: Any = version("lakefeed")
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'lakefeed' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
