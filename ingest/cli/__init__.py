"""Command line: `lakefeed COMMAND`. Options come in; results go to standard output, progress to standard error.

    main       names every command, and imports one when it is called
    serve      the service in one process               push        a file of changes to a service
    control    status and flush of a running service    config      every setting and where its value came from
    catalog    the catalog alone, backup and restore    wal         inspect and repair the log
    verify     a table's files against its records      quarantine  list, replay and drop refused changes

The pipeline's commands stand in `lakefeed.pipeline`; what all commands share is `lakefeed.command_line`.
Nothing imports this folder.
"""
