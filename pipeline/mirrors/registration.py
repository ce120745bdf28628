"""A mirror as a consumer of its change table. Owns that it is one for as long as it reads, whatever that takes.

A registration lasts for some days. One that is made before a whole table is read is renewed until that is done, lest
expiry passes it, and the stream that begins there has lost its beginning. Trouble with it is logged and harms nobody: a
mirror of a table that cannot be tagged is better than none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.consumers import register
from pipeline.mirrors.names import MirrorNames
from pipeline.spark_errors import message_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

# A registration is a commit to the change table: often enough for expiry to let go of what is merged.
REGISTER_EVERY_S = 60.0
# The end waits so long for a registration that is under way.
_JOIN_S = 60.0


class Registration:
    """The consumer that one mirror is."""

    def __init__(self, spark: SparkSession, names: MirrorNames) -> None:
        self._spark = spark
        self._names = names

    def note(self, snapshot: int) -> None:
        """Say that all up to a snapshot is read; where it was said before, that the mirror is still there."""
        try:
            register(self._spark, self._names.table_sql, self._names.consumer, snapshot)
        except Exception as error:  # noqa: BLE001 - see above
            _log.warning("mirror_not_noted", extra={"table": str(self._names.table), "reason": message_of(error)})

    @contextmanager
    def kept(self, snapshot: int) -> Iterator[None]:
        """Register at a snapshot, and again and again while the block lasts."""
        from pyspark import InheritableThread  # noqa: PLC0415 - optional, as all of Spark

        self.note(snapshot)
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(REGISTER_EVERY_S):
                self.note(snapshot)

        thread = InheritableThread(target=renew, name=f"registration-{self._names.mirror}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_JOIN_S)
