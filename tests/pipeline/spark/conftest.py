from __future__ import annotations

import pytest


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let this process look as if spark-submit had started it."""
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    return monkeypatch
