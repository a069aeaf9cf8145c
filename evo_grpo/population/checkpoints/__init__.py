"""Saves and loads agents: PEFT folders, attributes.json, optimizer.safetensors."""
