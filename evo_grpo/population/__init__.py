"""N agents over one base: their shared state, their rounds, and the processes that train them.

The module `round` runs one round of training and evolution; read it after `evo_grpo.training.run`.
"""
