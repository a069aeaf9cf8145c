"""How the hyperparameters of the next round vary: one file per exploration."""
