"""Adapters to the tasks and games of other packages, one module per package."""
