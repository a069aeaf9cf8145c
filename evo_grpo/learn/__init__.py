"""Trains any set of agents: rows, micro-batches, losses and optimizer steps."""
