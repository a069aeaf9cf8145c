"""N agents over one base: their shared parts, and the state of each agent."""
