"""Scan planning: which files a scan of a table has to read, decided from its manifests."""
