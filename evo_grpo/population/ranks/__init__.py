"""Ranks, which are the processes of a run, among which its agents are divided."""
