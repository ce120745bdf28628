"""Stores: the database of the catalog, with names, properties, metadata pointers and idempotency records.

    service --> store.py   every operation as statements --+--> sqlite.py     a file (one machine), or memory (tests)
                  |                                        +--> postgres.py   shared by several processes
                  +-> outcomes.py   idempotency records

Metadata itself is in files; a store holds where they are. One contract test runs against all databases. Only
catalog/service and catalog/routes use stores; catalog/app.py chooses one.
"""
