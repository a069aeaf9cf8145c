"""The Python interface: `run`, `resume`, the agents GRPO, GSPO and CISPO, and Population.

The subpackage `agilerl` offers the classes with AgileRL's names and arguments.
"""
