"""Predicts a model's size and a run's memory and time, without torch and without weights."""
