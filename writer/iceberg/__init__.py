"""The table format: partitions, manifests, table state and markers, and the client of the REST catalog."""
