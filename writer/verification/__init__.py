"""What every snapshot records of its rows, and how that is checked against the files: the ledger and `lakefeed verify`."""
