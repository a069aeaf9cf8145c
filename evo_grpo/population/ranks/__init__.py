"""Ranks: processes that share the agents of one run between them."""
