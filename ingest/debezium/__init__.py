"""Debezium's events, read from requests of its HTTP sink. Pure.

    body, headers --envelope--> events --positions--> which are new --(intake.debezium)--> a batch like any other
                     |                 `-transactions-> did all of a transaction arrive
                     |-- forms    envelope, unwrapped row, CloudEvent; headers of the sink
                     `-- values   rows, logical types, TOAST placeholders, Connect schemas

`intake.debezium` calls it; it imports the wire limits of `writer.wire` and nothing else of ingest but `errors`.
"""
