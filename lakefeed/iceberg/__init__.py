"""Iceberg's table format: the one implementation, for writer and catalog. Pure: no files, no network, no clock.

    table metadata (JSON)      types      types, fields, schemas; walk, map_type, promotes, decimal_parts
                               layout     partition specs and sort orders, and the settings they come from
    settings, transforms       terms      grammar of transforms and of `partition` and `sort`
    values                     values     binary form (bounds), stored form (partition tuples), JSON form (literals)
                               transforms results of transforms for single values
    manifests (Avro)           avro       one reader, one writer, the schemas
                               manifests  lists, manifests and entries, with all that entries inherit
    data files (Parquet)       arrow      Arrow schemas, transforms of columns, splitting and sorting of rows

Imports go up this list: types and terms import no other module, arrow and manifests import all they need. Only `arrow`
loads pyarrow, so that a catalog process stays small. Keys and fields of later format versions are kept, not dropped.
Writer and catalog import this package; it imports `lakefeed.contract` only.

Lakefeed does not use PyIceberg here. tests/pyiceberg compares both: PyIceberg drops unknown fields, writes no format 3,
and can crash the process on a damaged manifest (0.12.0). It serves commands and tests as a second reader.
"""
