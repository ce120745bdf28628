"""Deterministic simulation: nodes, sources, catalog and object store in one process, under virtual time and faults.

    source --sockets--> node (the real `serving`) --session--> catalog (the real application, store in memory)
                          |    \\--store--> objects                |
                          disk (journal, loses power)              +--> lake: what was committed, and when

    loop.py      event loop with a virtual clock; time, randomness and executors of a run
    network.py   links that delay, lose, duplicate and reorder; HTTP and WebSocket without sockets
    storage.py   object store in memory, and the stand-in for Parquet
    catalog.py   the catalog's process: kill, restart, restore
    operators.py other clients of the catalog: drop, compact, expire, roll back
    node.py      one node: starts the real service, kills it and starts it again
    sources.py   clients: numbered changes over WebSocket and HTTP, rows that the service numbers
    lake.py      what the tables held after each commit, read from the metadata
    world.py     one run: draws everything from a seed, injects faults, lets the system become quiet, checks
    scenarios.py which faults a run may draw, and what is known to fail

One seed gives one run. Real: log, intake, deduplication, sessions, replies, feed, tables, rounds, commits, markers,
catalog. Fake: sockets, clock, threads, object store, Parquet. docs/simulation.md describes how to replay a seed.
"""
