"""Names and metadata pointers, with compare-and-swap."""
