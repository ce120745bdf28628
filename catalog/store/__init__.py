"""Stores: the database of the catalog, with names, properties, metadata pointers and idempotency records.

    service --Store--> sqlite.py (one machine) | postgres.py (several processes) | memory.py (tests, simulations)

Metadata itself is in files; a store holds where they are. protocol.py defines what every store does, and one contract
test runs against all three. Only catalog/service uses stores; catalog/app.py chooses one.
"""
