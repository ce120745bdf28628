"""Consumers: readers of a table that have said how far they have come, so that expiry does not pass them.

from pipeline.consumers import follow

query = spark.readStream.table("lake.sales.orders").writeStream.foreachBatch(...).start()
with follow(query, spark=spark, table="lake.sales.orders", name="dashboard"):
    query.awaitTermination()
"""

from lakefeed.contract.consumers import MAX_AGE_DEFAULT, Consumer
from lakefeed.pipeline.consumers.following import Follower, finished_snapshot, follow
from lakefeed.pipeline.consumers.registry import consumers, drop, hold, register

__all__ = [
    "MAX_AGE_DEFAULT",
    "Consumer",
    "Follower",
    "consumers",
    "drop",
    "finished_snapshot",
    "follow",
    "hold",
    "register",
]
