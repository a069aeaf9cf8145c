"""Readers show or forward a run: the terminal, the report, trackers, the dashboard."""
