"""Subsampling: which records and coordinates take part in a step."""

from hush.sampling.coordinates import Coordinate, Twice
from hush.sampling.poisson import FullBatch, Poisson

__all__ = ["Coordinate", "FullBatch", "Poisson", "Twice"]
