"""N agents over one base: the parts that they share, and the state of each agent."""
