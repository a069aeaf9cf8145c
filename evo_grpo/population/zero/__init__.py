"""Trains by DeepSpeed's ZeRO through accelerate, with one engine that agents use in turn."""
