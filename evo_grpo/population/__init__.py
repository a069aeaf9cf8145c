"""N agents over one base: their shared state, their rounds, and the processes that share them.

`round` plays a round and is to be read second, after `evo_grpo.training.run`.
"""
