"""Write-ahead log: frames are durable here before they are acked, and stay until every table has committed them.

    intake --append--> [segment] [segment] [newest] --tail--> feed (writer.tables)
                           |                  ^
                           +--trim--> spare --+        trim: all tables have committed everything below an offset

    protocol   what intake and feed need from a log: another log can take the place of the files
    log        the log on local files: append and sync, rotate, trim       tail   read durable records in order
    payload    what a record holds                                         records, directory   bytes, files, crashes
    inspect    what is there, damaged and missing, without opening it      repair               rewrite damaged segments

Records may be corrupt on disk; they are never silently skipped. Imports writer.config and the shared packages only.
"""
