"""GRPO on any `nn.Module` that maps token ids to logits: no population, no LoRA, no tokenizer."""
