"""Environments of many turns: the protocol, one episode as token ids, many side by side."""
