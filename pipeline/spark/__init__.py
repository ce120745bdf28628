"""Spark: the session on the catalog, and what all jobs read and say through it.

    settings    [pipeline.spark], and what a session is built from
    runtime     Java, Spark version, jars: what the machine has to offer
    session     settings of Spark, the session, the end of its JVM
    options     click options of every Spark command, errors as one line
    commands    `lakefeed spark`: run SQL, open a Python shell, print settings for another Spark
    sql         quoting: identifiers, texts, types, property lists
    tables      names, properties and snapshots of tables, by Spark SQL
    metadata    table metadata and commit properties, through Spark's JVM
    failures    what Spark's errors mean, retries on commit conflicts

Imported by every other part of the pipeline; imports none of them. PySpark is imported only when a session is opened.
"""
