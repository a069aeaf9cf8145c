"""N agents over one base: their shared state, their rounds, and the processes that train them.

`round` plays a round; read it second, after `evo_grpo.training.run`.
"""
