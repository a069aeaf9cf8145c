"""A faster forward for the Llama family, which computes the same as the model's modules."""
