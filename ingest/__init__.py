"""From the socket to the log: wire protocol, sessions, admission, deduplication, acks, control plane and CLI."""
