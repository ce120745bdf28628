"""Batches as clients send them."""
