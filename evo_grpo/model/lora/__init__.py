"""LoRA slots, which are adapters of PEFT, and operations on LoRA configurations."""
