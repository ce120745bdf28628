"""The floor for the catalog: what aiohttp, SQLite and a synced file cost alone.

`python -m tests.bench.bare_catalog DIRECTORY PORT`

GET  /load/{size}      one read of a pointer, and ready bytes of that size
POST /commit/{size}    a synced file of that size, and a synced swap of a pointer
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from pathlib import Path

from aiohttp import web


def build_app(directory: Path) -> web.Application:
    database = sqlite3.connect(directory / "bare.sqlite", isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE pointers (name TEXT PRIMARY KEY, location TEXT)")
    database.execute("INSERT INTO pointers VALUES ('t', 'here')")
    bodies: dict[int, bytes] = {}

    async def load(request: web.Request) -> web.Response:
        database.execute("SELECT location FROM pointers WHERE name = 't'").fetchone()
        size = int(request.match_info["size"])
        body = bodies.setdefault(size, b"x" * size)
        return web.Response(body=body, content_type="application/json")

    def write(body: bytes, number: int) -> None:
        with (directory / f"{number}.json").open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        database.execute("BEGIN IMMEDIATE")
        database.execute("UPDATE pointers SET location = ? WHERE name = 't'", (str(number),))
        database.execute("COMMIT")

    numbers = iter(range(10**9))

    async def commit(request: web.Request) -> web.Response:
        await request.read()
        size = int(request.match_info["size"])
        await asyncio.to_thread(write, bodies.setdefault(size, b"x" * size), next(numbers))
        return web.Response(body=b"{}", content_type="application/json")

    app = web.Application()
    app.router.add_get("/load/{size}", load)
    app.router.add_post("/commit/{size}", commit)
    return app


if __name__ == "__main__":
    web.run_app(
        build_app(Path(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[2]), access_log=None, print=lambda *_: None
    )
