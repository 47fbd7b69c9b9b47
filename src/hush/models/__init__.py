"""Networks of the papers, by name."""

from hush.models.registry import NAMES, build, models_for

__all__ = ["NAMES", "build", "models_for"]
