"""Scan planning on the server: which files a scan reads, for clients that do not read manifests themselves.

    plan request -> planner.py -> tasks.py -> expressions.py   the filter, bound to columns
                       |             |
                       |             +-> evaluate.py           statistics: which files may match, what is left to check
                       +-> files and service.tables            manifests, metadata

Only planner.py reads files and runs tasks; the other modules decide. catalog/routes uses this package.
"""
