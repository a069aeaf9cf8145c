"""The tasks of the embedded models."""
