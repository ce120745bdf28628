"""What every snapshot records of its rows (the ledger), and how the files are checked against it: `lakefeed verify`."""
