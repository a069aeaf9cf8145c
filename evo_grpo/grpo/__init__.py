"""Group-relative policy optimisation: the pure mathematics, and the agents that use it."""
