"""DeepSpeed's ZeRO through accelerate: one engine, on which the agents take turns."""
