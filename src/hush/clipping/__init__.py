"""Clipping rules and their sensitivity sets."""

from hush.clipping.blocks import Box, Principal, Subspaces
from hush.clipping.norms import L2, Entries, Importance, L2Linf, Linf, Lp, Normalized, Quantile

__all__ = ["L2", "Box", "Entries", "Importance", "L2Linf", "Linf", "Lp", "Normalized", "Principal"]
__all__ += ["Quantile", "Subspaces"]
