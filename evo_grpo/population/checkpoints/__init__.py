"""An agent on disk: PEFT folders, attributes.json, optimizer.safetensors."""
