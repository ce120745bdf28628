"""Object storage: whole objects by location, for the writer's data files and the catalog's metadata files.

    writer, catalog  ->  store.py  ->  local.py   file:///path, file:/path, /path
                                       s3.py      s3://bucket/key (also s3a, s3n), by aiobotocore
                                       cloud.py   gs://bucket/key, abfss://container@account.../key, by obstore

The settings stand in config.py, which imports no client library. Stores know nothing of what objects hold, and of
nothing above `lakefeed.contract`. `pipeline` does not import this package: Spark has its own clients.
"""
