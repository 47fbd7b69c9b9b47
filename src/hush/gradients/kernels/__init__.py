"""Kernels for GPUs, in Triton: loaded only if there is one."""
