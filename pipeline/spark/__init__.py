"""Spark: the session on the catalog, and what all jobs read and say through it.

    session     [pipeline.spark], settings of Spark, the session, the end of its JVM
    runtime     Java, Spark version, jars: what the machine has to offer
    options     click options of every Spark command, errors as one line
    commands    `lakefeed spark`: run SQL, open a Python shell, print settings for another Spark
    tables      quoting; names, properties, snapshots and metadata of tables; properties of a commit
    failures    what Spark's errors mean, retries on commit conflicts

Imported by every other part of the pipeline; imports none of them. PySpark is imported only when a session is opened.
"""
