"""PyIceberg as a second reader and writer of the format: differential tests, and its known faults as strict xfails.

An xfail that passes means that a newer PyIceberg has fixed the fault. The reason names the upstream issue, if there is
one. Damaged files are never given to PyIceberg here: version 0.12.0 can crash the process on them (#3952).
"""
