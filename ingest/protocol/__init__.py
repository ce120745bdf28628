"""Messages, batches and sessions of the wire protocol."""
