"""Sample answers of a trained adapter, and measure its mean reward on a split of a task."""
