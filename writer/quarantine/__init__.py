"""Rows that their table cannot take: kept whole in a table of their namespace, listed, replayed or dropped."""
