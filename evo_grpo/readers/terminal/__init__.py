"""What a person sees of a run: progress, leaderboard, family tree; in a terminal, notebook or pipe.

Below `api` and `cli`, because `Population.train` and `evo-grpo run` show the same progress.
"""
