"""Trains a run from its settings to its summary; read `run` first, then `assemble` and `judge`.

The package is not called run, because `evo_grpo.run` is the function.
"""
