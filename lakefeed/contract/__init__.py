"""What tables record, for writer and pipeline; standard library only."""
