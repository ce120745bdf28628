"""The write-ahead log: checked records in recycled segments, and reading behind their end."""
