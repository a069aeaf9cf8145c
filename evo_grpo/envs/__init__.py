"""Environments: prompts and rewards from datasets, built-in tasks and other packages."""
