"""The control plane and ingest over HTTP."""
