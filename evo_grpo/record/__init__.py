"""The record of a run: its folder, trials, family tree, leaderboard and history; no torch."""
