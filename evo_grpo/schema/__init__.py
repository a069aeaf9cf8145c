"""How settings are declared, and the hyperparameters of an agent with their ranges; no torch."""
