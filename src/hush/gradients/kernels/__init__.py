"""Kernels for GPUs, in Triton: loaded only where there is one."""
