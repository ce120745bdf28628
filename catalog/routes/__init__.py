"""HTTP handlers, one file per REST resource."""
