"""Triton kernels; imported only if there is a GPU."""
