"""Command line: `lakefeed COMMAND`. Options come in; results go to standard output, progress to standard error.

    main       names every command, and imports one when it is called
    service    serve, status, flush, config             push        a file of changes to a service
    catalog    the catalog alone, backup and restore    wal         inspect and repair the log
    verify     a table's files against its records      quarantine  list, replay and drop refused changes

The pipeline's commands stand in `lakefeed.pipeline`; what all commands share is `lakefeed.command_line`.
Nothing imports this folder.
"""
