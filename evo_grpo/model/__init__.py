"""The shared base, its LoRA slots, and the forward that serves all of them at once."""
