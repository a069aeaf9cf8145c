"""What a run leaves behind: its folder, trials, family tree and leaderboard; no torch."""
