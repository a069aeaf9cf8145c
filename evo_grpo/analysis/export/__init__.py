"""Exports an agent of a run to a folder, with a model card."""
