"""The record of a run: folder, trials, family tree, leaderboard, history. It imports no torch."""
