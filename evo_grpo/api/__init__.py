"""The Python interface: GRPO, GSPO, CISPO and Population, handles on a cohort; `run`, `resume`.

`agilerl` wraps them under AgileRL's names.
"""
