"""Tables and their feed: buffers, flushes, quarantine, status."""
