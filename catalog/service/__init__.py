"""Operations of the catalog: what a request does, between HTTP (catalog/routes) and the database (catalog/store).

    routes -> idempotency.py -> tables.py -> versions.py -> store             the pointer
                 |                 |            +-> metadata_files.py         the files
                 |                 +-> purge.py
                 +-> load_responses.py

An operation that is one call of the store has no function here: the routes call the store. Decisions about documents
are made in catalog/metadata. backup.py serves the commands `lakefeed catalog backup`, `restore` and `validate`.
catalog/planning and catalog/routes use this package.
"""
