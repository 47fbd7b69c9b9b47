"""Sensitivity sets and how to project onto them."""

from hush.clipping.blocks import Box, Principal, Subspaces
from hush.clipping.norms import L2, Entries, Importance, L2Linf, Linf, Lp

__all__ = ["L2", "Box", "Entries", "Importance", "L2Linf", "Linf", "Lp", "Principal", "Subspaces"]
