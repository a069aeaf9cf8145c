"""Progress, leaderboard and family tree of a run, in a terminal, a notebook or a pipe.

This package lies below `api` and `cli`, since `Population.train` and `evo-grpo run` both use it.
"""
