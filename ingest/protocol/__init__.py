"""The wire protocol, version 1, as values: messages, batches, sessions and verdicts. Pure.

    frame --messages--> message --session--> Offer --(intake)--> Verdict --(websocket, http)--> ack, nack or HTTP status
                                    |
                                  batch: checks of a batch, declarations, source transactions

The format of a batch itself is `writer.wire`, because the log stores it. Field names and reasons are DoLake's where it
has them. Every other folder of ingest may import this one; it imports `debezium` at most.
"""
