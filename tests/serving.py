"""Serves an aiohttp application from a thread of its own, for clients that block the thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 120.0


@contextlib.contextmanager
def serve_in_thread(app: web.Application) -> Iterator[str]:
    """Serve on a free loopback port, yield the base URL, and stop the application in order afterwards."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="serve-app", daemon=True)
    thread.start()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    try:
        yield asyncio.run_coroutine_threadsafe(_start(runner), loop).result(_START_TIMEOUT_S)
    finally:
        asyncio.run_coroutine_threadsafe(_stop(runner), loop).result(_STOP_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_TIMEOUT_S)
        loop.close()


async def _start(runner: web.AppRunner) -> str:
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


async def _stop(runner: web.AppRunner) -> None:
    await runner.cleanup()
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
