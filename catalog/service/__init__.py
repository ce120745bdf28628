"""Operations of the catalog: what a request does, between HTTP (catalog/routes) and the database (catalog/store).

    routes -> idempotency.py -> tables.py, views.py, namespaces.py -> versions.py -> store       the pointer
                                    |                                     |
                                    +-> purge.py                          +-> metadata_cache.py  the files

Decisions about documents are made in catalog/metadata. backup.py serves the commands `lakefeed catalog backup`,
`restore` and `validate`. catalog/planning and catalog/routes use this package.
"""
