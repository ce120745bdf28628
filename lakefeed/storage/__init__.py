"""Object stores, for writer and catalog."""
