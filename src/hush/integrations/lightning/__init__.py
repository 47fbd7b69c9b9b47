"""Lightning: private training in its loop, with the module that people have. docs/lightning.md."""

from hush.integrations.lightning.loader import PoissonLoader
from hush.integrations.lightning.module import PrivateModule

__all__ = ["PoissonLoader", "PrivateModule"]
