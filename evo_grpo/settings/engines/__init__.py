"""The declaration of each rollout engine: its settings, checks and memory."""
