"""Rows, micro-batches, and one optimizer step for any set of agents."""
