"""A trained adapter, tried: what it answers, and its reward on a split of a task."""
