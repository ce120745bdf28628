"""Fixtures that several packages' tests share: the real servers around Lakefeed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

from tests.s3_server import S3Server, run_s3_server

# The suite tries the same examples every time, so that a change is judged by what it changed. `make soak` looks for
# new ones.
hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.register_profile("soak", derandomize=False)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server for the whole run; tests make buckets with `create_bucket()`."""
    with run_s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server
