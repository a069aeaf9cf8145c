"""Shows runs, or forwards them: the terminal, the report, trackers, the dashboard."""
