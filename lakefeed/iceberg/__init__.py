"""The table format, pure, for writer and catalog."""
