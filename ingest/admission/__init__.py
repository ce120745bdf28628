"""Who is let in, and how much of theirs."""
