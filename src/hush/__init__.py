"""hush: private training with noise that fits.

Values import at once; what needs SciPy or torch is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hush.clipping import L2, Box, Entries, Importance, L2Linf, Linf, Lp, Principal, Subspaces
from hush.core.guarantee import Bound, Budget, Guarantee, Neighbours
from hush.core.lazy import lazy_modules
from hush.core.part import Always
from hush.core.plan import Plan
from hush.core.selective import Selective
from hush.noise import (
    BlockGaussian,
    Gaussian,
    GeneralizedGaussian,
    Laplace,
    Quantized,
    Rectified,
    StochasticSign,
    Truncated,
)
from hush.sampling import Coordinate, FullBatch, Poisson, Twice

if TYPE_CHECKING:
    from hush.accounting.bounded import fisher, individual_rdp
    from hush.accounting.calibrate import calibrate
    from hush.accounting.charge import epsilon, rdp
    from hush.accounting.ledger import Ledger
    from hush.accounting.shaping import fit_noise
    from hush.training.loop import train
    from hush.training.mean import mean
    from hush.training.step import PrivateStep

__version__ = "0.1.0"

__all__ = [
    "L2",
    "Always",
    "BlockGaussian",
    "Bound",
    "Box",
    "Budget",
    "Coordinate",
    "Entries",
    "FullBatch",
    "Gaussian",
    "GeneralizedGaussian",
    "Guarantee",
    "Importance",
    "L2Linf",
    "Laplace",
    "Ledger",
    "Linf",
    "Lp",
    "Neighbours",
    "Plan",
    "Poisson",
    "Principal",
    "PrivateStep",
    "Quantized",
    "Rectified",
    "Selective",
    "StochasticSign",
    "Subspaces",
    "Truncated",
    "Twice",
    "calibrate",
    "epsilon",
    "fisher",
    "fit_noise",
    "individual_rdp",
    "mean",
    "rdp",
    "train",
]

_LAZY = {
    "Ledger": "hush.accounting.ledger",
    "PrivateStep": "hush.training.step",
    "calibrate": "hush.accounting.calibrate",
    "epsilon": "hush.accounting.charge",
    "fisher": "hush.accounting.bounded",
    "fit_noise": "hush.accounting.shaping",
    "individual_rdp": "hush.accounting.bounded",
    "mean": "hush.training.mean",
    "rdp": "hush.accounting.charge",
    "train": "hush.training.loop",
}


_modules = lazy_modules(__name__)


def __getattr__(name: str) -> Any:
    return getattr(import_module(_LAZY[name]), name) if name in _LAZY else _modules(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
