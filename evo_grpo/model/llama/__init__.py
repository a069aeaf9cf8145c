"""The fast path of the Llama family: the numbers of the model's own modules in fewer passes."""
