"""hush: private training with noise that fits.

Values import at once; what needs SciPy or torch is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hush.clipping import L2, Box, Entries, Importance, L2Linf, Linf, Lp, Principal, Subspaces
from hush.core.guarantee import Bound, Budget, Guarantee, Neighbours
from hush.core.lazy import lazy_modules
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.release import Selective
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
    from hush.accounting.calibrate import calibrate
    from hush.accounting.epsilon import epsilon, rdp
    from hush.accounting.ledger.ledger import Ledger
    from hush.accounting.per_instance.bounded import fisher, individual_rdp
    from hush.accounting.shaping.fit import fit_noise
    from hush.training.loop import train
    from hush.training.methods.mean import mean
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
    "Ledger": "hush.accounting.ledger.ledger",
    "PrivateStep": "hush.training.step",
    "calibrate": "hush.accounting.calibrate",
    "epsilon": "hush.accounting.epsilon",
    "fisher": "hush.accounting.per_instance.bounded",
    "fit_noise": "hush.accounting.shaping.fit",
    "individual_rdp": "hush.accounting.per_instance.bounded",
    "mean": "hush.training.methods.mean",
    "rdp": "hush.accounting.epsilon",
    "train": "hush.training.loop",
}


_modules = lazy_modules(__name__)


def __getattr__(name: str) -> Any:
    return getattr(import_module(_LAZY[name]), name) if name in _LAZY else _modules(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
