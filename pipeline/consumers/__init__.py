"""Consumers: streaming readers of a table that are registered as tags, so that expiry keeps what they still need.

    query ---progress---> registry ---CREATE OR REPLACE TAG---> table
                                                                  |
    maintenance, /status <-- lakefeed.contract.consumers: <-------+
                             History, Consumer

For users:

    from lakefeed import follow

    query = spark.readStream.table("lake.sales.orders").writeStream.foreachBatch(...).start()
    with follow(query, spark=spark, table="lake.sales.orders", name="dashboard"):
        query.awaitTermination()

Imported by maintenance and mirrors; imports spark.
"""
