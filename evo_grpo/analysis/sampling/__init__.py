"""Sample answers of an adapter, and measure its mean reward on a split of a task."""
