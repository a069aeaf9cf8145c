"""Samples completions for all agents of a population in one generation call."""
