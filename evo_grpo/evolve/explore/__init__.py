"""Explorations, which vary hyperparameters for the next round; one file for each."""
