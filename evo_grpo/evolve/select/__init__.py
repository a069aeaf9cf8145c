"""Who survives a round, and whose copies fill the other places: one file per selection."""
