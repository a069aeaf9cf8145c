"""Completions for every agent of a population in one generation call."""
