"""A service that was pushed to once and serves the tests of a module, on local files or on S3."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.service_process import ServiceProcess, service_process


@contextlib.contextmanager
def pushed_service(
    directory: Path, settings: Mapping[str, Any], push: Callable[[ServiceProcess], object]
) -> Iterator[ServiceProcess]:
    """Start a service, push, and stop it in order at the end."""
    with service_process(directory, settings) as service:
        service.start()
        push(service)
        yield service
        assert service.stop() == 0
