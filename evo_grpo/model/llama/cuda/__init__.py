"""Decoding and learning of the Llama family by Triton kernels, on CUDA."""
