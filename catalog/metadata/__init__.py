"""Table metadata documents: document in, document out."""
