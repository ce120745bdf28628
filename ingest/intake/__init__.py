"""From a batch to the log: decide, persist, record."""
