"""Arrow IPC frames: reading them safely, and bringing their columns to those of the table."""
