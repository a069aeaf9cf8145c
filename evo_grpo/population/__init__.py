"""N agents over one base: their shared state, their rounds, and the processes that train them.

`round` runs a round of training and evolution; read it after `evo_grpo.training.run`.
"""
