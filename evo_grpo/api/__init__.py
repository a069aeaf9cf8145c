"""The Python interface: `run`, `resume`, and GRPO, GSPO, CISPO and Population over a cohort.

The subpackage `agilerl` wraps the classes under AgileRL's names.
"""
