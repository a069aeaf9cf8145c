"""The shared base, its LoRA slots, and one forward for the adapters of all agents."""
