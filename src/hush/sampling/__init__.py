"""Subsampling: which records and coordinates take part in a step."""

from hush.sampling.poisson import Coordinate, FullBatch, Poisson, Twice

__all__ = ["Coordinate", "FullBatch", "Poisson", "Twice"]
