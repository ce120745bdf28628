"""Commits: data files become snapshots through an Iceberg REST catalog, each exactly once.

    committer.py --> plan.py        what to commit, and what a fresh table says of an attempt
                 --> manifests.py   manifests and their list, written before the catalog is asked
                 --> rest_catalog.py   the request, and what each response means for a commit

    state.py    a table between two commits          fencing.py   one service per node id
    expiry.py   old snapshots and their files        sources.py   resume positions and consumers of all tables

In: a TableState and a Flush. Out: the next TableState. Imported by files/, tables/, quarantine/ and the service.
"""
