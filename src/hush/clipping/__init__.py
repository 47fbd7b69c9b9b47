"""Sensitivity sets and how to project onto them."""

from hush.clipping.l2 import L2

__all__ = ["L2"]
