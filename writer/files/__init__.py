"""Rows as data files, written and read back."""
