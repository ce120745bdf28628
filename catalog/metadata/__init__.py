"""Table and view metadata: documents in, documents out. Pure: no I/O, no clock, no randomness.

    requirements + updates --updates.py--> Draft --> new document --> bytes of its file (document.py)
                              |  layout.py     schemas, partition specs, sort orders (schema.py, partitioning.py)
                              |  snapshots.py  snapshots, branches, tags, statistics, the append-only rule

A document is plain JSON (dicts and lists), so that fields this catalog does not know survive. Documents are shared
and never changed: a commit makes a new one. views.py does the same for views. catalog/service calls this package.
"""
