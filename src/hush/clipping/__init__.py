"""Sensitivity sets and how to project onto them."""

from hush.clipping.blocks import Box, Subspaces
from hush.clipping.entries import Entries
from hush.clipping.importance import Importance
from hush.clipping.l2 import L2
from hush.clipping.linf import L2Linf, Linf
from hush.clipping.lp import Lp
from hush.clipping.principal import Principal

__all__ = ["L2", "Box", "Entries", "Importance", "L2Linf", "Linf", "Lp", "Principal", "Subspaces"]
