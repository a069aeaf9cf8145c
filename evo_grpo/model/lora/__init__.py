"""LoRA slots through PEFT, and LoRA configurations on paper."""
