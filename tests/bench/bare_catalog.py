"""The floor for the catalog: what aiohttp, SQLite and a synced file cost alone.

`python -m tests.bench.bare_catalog DIRECTORY PORT`

GET  /load/{size}      one read of a pointer, and ready bytes of that size
PUT  /document         a table's document, for the commits that follow
POST /commit           that document serialised into a synced file, and a synced swap of a pointer
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web


def build_app(directory: Path) -> web.Application:
    database = sqlite3.connect(directory / "bare.sqlite", isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("CREATE TABLE pointers (name TEXT PRIMARY KEY, location TEXT)")
    database.execute("INSERT INTO pointers VALUES ('t', 'here')")
    bodies: dict[int, bytes] = {}
    documents: dict[str, Any] = {}

    async def load(request: web.Request) -> web.Response:
        database.execute("SELECT location FROM pointers WHERE name = 't'").fetchone()
        size = int(request.match_info["size"])
        body = bodies.setdefault(size, b"x" * size)
        return web.Response(body=body, content_type="application/json")

    async def put_document(request: web.Request) -> web.Response:
        documents["t"] = orjson.loads(await request.read())
        return web.Response(status=204)

    def write(number: int) -> None:
        body = orjson.dumps(documents["t"])
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
        await asyncio.to_thread(write, next(numbers))
        return web.Response(body=b"{}", content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_get("/load/{size}", load)
    app.router.add_put("/document", put_document)
    app.router.add_post("/commit", commit)
    return app


if __name__ == "__main__":
    web.run_app(
        build_app(Path(sys.argv[1])), host="127.0.0.1", port=int(sys.argv[2]), access_log=None, print=lambda *_: None
    )
