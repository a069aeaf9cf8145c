"""Environments of many turns: their protocol, an episode as token ids, episodes in parallel."""
