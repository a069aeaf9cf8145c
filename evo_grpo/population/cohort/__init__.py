"""N agents over one base: what they share, and each agent's own state."""
