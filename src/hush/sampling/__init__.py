"""Who takes part in a step."""

from hush.sampling.participation import FullBatch, Poisson

__all__ = ["FullBatch", "Poisson"]
