"""The declaration of each rollout engine: its settings, checks, memory and lines in the plan."""
