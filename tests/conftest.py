"""Fixtures that several packages' tests share: the real servers around Lakefeed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3_server import S3Server, run_s3_server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server for the whole run; tests make buckets with `create_bucket()`."""
    with run_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
