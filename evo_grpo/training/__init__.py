"""A run from its settings to its summary: `run` is to be read first, then `assemble` and `judge`.

Called training, not run: `evo_grpo.run` is the function.
"""
