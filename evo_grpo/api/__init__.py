"""What Python calls: GRPO, GSPO, CISPO and Population, thin handles on a cohort; `run`, `resume`.

`agilerl` has AgileRL's names over them; `whole_model` is GRPO on any `nn.Module`.
"""
