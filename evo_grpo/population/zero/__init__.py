"""Trains with DeepSpeed's ZeRO through accelerate: one engine, on which agents take turns."""
