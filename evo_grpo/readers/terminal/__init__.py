"""Progress, leaderboard and family tree of a run, in a terminal, a notebook or a pipe.

Below `api` and `cli`, because `Population.train` and `evo-grpo run` show the same progress.
"""
