"""hush: private training with noise that fits.

Values import at once; what needs SciPy or torch is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hush import noise
from hush.clipping import L2, Box, Entries, Importance, L2Linf, Linf, Lp, Principal, Subspaces
from hush.core.guarantee import Bound, Budget, Guarantee, Neighbours
from hush.core.lazy import lazy_modules
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.noise import *  # noqa: F403  (its list of laws is the one list)
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
    "Bound",
    "Box",
    "Budget",
    "Coordinate",
    "Entries",
    "FullBatch",
    "Guarantee",
    "Importance",
    "L2Linf",
    "Ledger",
    "Linf",
    "Lp",
    "Neighbours",
    "Plan",
    "Poisson",
    "Principal",
    "PrivateStep",
    "Selective",
    "Subspaces",
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
__all__ += noise.__all__

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
