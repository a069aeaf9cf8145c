"""How a setting is declared; an agent's hyperparameters, and which of them may mutate; no torch."""
