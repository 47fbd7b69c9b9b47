"""hush: private training with noise that fits.

Values import at once; what needs SciPy or torch is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hush.clipping import L2, Entries, Lp
from hush.core.guarantee import Bound, Budget, Guarantee, Neighbours
from hush.core.part import Always
from hush.core.plan import Plan
from hush.core.selective import Selective
from hush.noise import Gaussian, GeneralizedGaussian, Laplace
from hush.sampling import FullBatch, Poisson

if TYPE_CHECKING:
    from hush.accounting.calibrate import calibrate
    from hush.accounting.charge import epsilon, rdp
    from hush.accounting.ledger import Ledger
    from hush.training.loop import train
    from hush.training.step import PrivateStep

__version__ = "0.1.0"

__all__ = [
    "L2",
    "Always",
    "Bound",
    "Budget",
    "Entries",
    "FullBatch",
    "Gaussian",
    "GeneralizedGaussian",
    "Guarantee",
    "Laplace",
    "Ledger",
    "Lp",
    "Neighbours",
    "Plan",
    "Poisson",
    "PrivateStep",
    "Selective",
    "calibrate",
    "epsilon",
    "rdp",
    "train",
]

_LAZY = {
    "Ledger": "hush.accounting.ledger",
    "PrivateStep": "hush.training.step",
    "calibrate": "hush.accounting.calibrate",
    "epsilon": "hush.accounting.charge",
    "rdp": "hush.accounting.charge",
    "train": "hush.training.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hush' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
