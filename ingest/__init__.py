"""Ingest: from sockets to the synced log, and everything that clients and operators talk to.

    websocket  http          listeners: /ws; /cdc, control plane, catalog under /v1
        |        |
        admission            tokens, limits, memory budget (pure)
        |        |
        protocol  debezium   messages, batches, sessions, verdicts; Debezium's events (pure)
            |
          intake             dedup and group commit into the log
            |
        writer.wal           then the writer takes over

`service` builds all parts and runs them; `cli` is the command line. Imports go down this list: cli, service, http,
websocket, intake, admission and metrics, config, protocol, debezium, errors.
"""
