"""Trains agents by DeepSpeed's ZeRO through accelerate, with one engine that they use in turn."""
