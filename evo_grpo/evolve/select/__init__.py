"""Selections, which decide which agents survive or are copied; one file for each."""
