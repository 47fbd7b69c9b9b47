"""Sensitivity sets and how to project onto them."""

from hush.clipping.entries import Entries
from hush.clipping.l2 import L2
from hush.clipping.lp import Lp

__all__ = ["L2", "Entries", "Lp"]
