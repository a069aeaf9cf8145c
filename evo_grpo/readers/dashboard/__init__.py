"""A run in optuna-dashboard: a copy of its study with notes and its family tree."""
