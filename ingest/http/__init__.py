"""The HTTP listener: ingest over HTTP, the control plane, and the catalog mounted beside them.

    listener   connections of the port, compressed bodies of the catalog's routes
    gate       tokens (401), and the lease of an ingest request: a slot and its bytes of the memory budget
    bodies     bodies of ingest requests, read within budget and time
    changes    POST /cdc and /cdc/debezium --> intake
    control    /status, /flush, /explain/flush, /health, /metrics

`service` builds and mounts them. The folder imports `websocket` (for /status), `intake` and the layers below.
"""
