"""The benchmark behind `make bench`: a real server process, a real client process, changes until they are committed."""
