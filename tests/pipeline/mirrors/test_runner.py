from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lakefeed.backoff import Backoff
from lakefeed.pipeline.errors import PipelineError
from lakefeed.pipeline.mirrors import runner
from lakefeed.pipeline.mirrors.follower import FollowOptions
from lakefeed.pipeline.mirrors.merge import ConcurrentMirror, MergeResult
from lakefeed.pipeline.mirrors.runner import MirrorRun
from lakefeed.pipeline.mirrors.settings import MirrorConfig, MirrorNames
from lakefeed.pipeline.spark.tables import TableIdentifier

TABLE = TableIdentifier.parse("users")


def start(monkeypatch: pytest.MonkeyPatch, *runs: Callable[[MirrorRun, Callable[[], None]], None]) -> MirrorRun:
    """Keep one table whose follower does these things, one at each start of it."""
    left = list(runs)

    class Scripted:
        has_merged = False

        def __init__(self, _spark: Any, names: MirrorNames, _settings: Any, options: FollowOptions) -> None:
            self._merge = lambda: options.on_merge(names, MergeResult(1, 1, 0))

        def run(self, *, once: bool) -> None:
            left.pop(0)(run, self._merge)

    monkeypatch.setattr(runner, "Follower", Scripted)
    monkeypatch.setattr(runner, "BACKOFF", Backoff(0.0, 0.0))
    run = MirrorRun(None, "lake", [TABLE], MirrorConfig())  # type: ignore[arg-type]
    run._keep(TABLE, once=False)
    assert not left
    return run


def fail(_run: MirrorRun, _merge: Callable[[], None]) -> None:
    raise PipelineError("no luck")


def test_a_failure_is_forgotten_once_the_table_merges_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def recover(run: MirrorRun, merge: Callable[[], None]) -> None:
        seen.append(dict(run.failures))
        merge()
        seen.append(dict(run.failures))
        run.stop()

    start(monkeypatch, fail, recover)
    assert seen == [{"default.users": "no luck"}, {}]


def test_a_table_that_another_application_merges_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(_run: MirrorRun, merge: Callable[[], None]) -> None:
        merge()
        raise ConcurrentMirror("default.users_current")

    [reason] = start(monkeypatch, fail, meet).failures.values()
    assert "another application merges into this mirror" in reason
