"""Shows the progress and the result of a run in a terminal, a notebook or a pipe.

Both `api` and `cli` import this package, for `Population.train` and `evo-grpo run`.
"""
