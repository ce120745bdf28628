"""The Iceberg REST catalog: HTTP in, table metadata documents out. Reached over HTTP only."""
