"""Predicts the size of a model and the memory of a run, without torch and without weights."""
