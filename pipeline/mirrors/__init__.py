"""Mirrors: the current rows of a change table, or the history of each, kept by Spark.

    commands -> runner -> follower -> (windows, transforms, merging) -> Spark

windows.py decides what to read next, fold.py folds it to one row per key, merge.py writes it together with the
marker that says how far the mirror has come. All of a mirror's memory is in its own tables.
"""
