"""Generation of the Llama family by kernels of its own, for CUDA devices."""
