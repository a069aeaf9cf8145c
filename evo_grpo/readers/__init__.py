"""What shows or forwards a run: the terminal, the report, trackers, the dashboard."""
