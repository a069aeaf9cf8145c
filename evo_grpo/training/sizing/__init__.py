"""What a model and a run need, from shapes and settings alone: no torch, no weights."""
