"""hush: differential privacy for PyTorch, with written proofs.

Plans, guarantees and errors are imported eagerly. Names that need SciPy or torch are imported on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hush import clipping, errors, noise, sampling
from hush.clipping import *  # noqa: F403  (each folder's list of its parts is the one list)
from hush.core import lazy_modules
from hush.core.errors import PrivacyWarning
from hush.core.guarantee import Adjacency, Bound, Budget, Guarantee, Neighbours
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.release import BestOf, Selective
from hush.noise import *  # noqa: F403
from hush.sampling import *  # noqa: F403

if TYPE_CHECKING:
    from hush.accounting.attacker import Attacker, Risk
    from hush.accounting.calibrate import calibrate, fit_noise
    from hush.accounting.epsilon import epsilon, rdp
    from hush.accounting.filters import RenyiFilter
    from hush.accounting.ledger import Ledger
    from hush.accounting.opacus import from_opacus
    from hush.accounting.per_instance import fisher, individual_rdp
    from hush.gradients.fix import fix
    from hush.pate.argmax import Confident, NoisyMax
    from hush.training.loop import train
    from hush.training.methods.least_squares import NoisyLeastSquares
    from hush.training.methods.public_bases import public_thresholds
    from hush.training.methods.statistics import mean
    from hush.training.options import Checkpoints, Distributed, Execution, Logging, Randomness, Units
    from hush.training.per_instance import PerInstance
    from hush.training.source import Source
    from hush.training.step import PrivateStep
    from hush.training.trial import Choice, LogUniform, Uniform
    from hush.training.tune import tune
    from hush.training.units import bound_contributions

__version__ = "0.2.0"

__all__ = ["Adjacency", "Always", "BestOf", "Bound", "Budget", "Guarantee", "Neighbours", "Plan"]
__all__ += ["PrivacyWarning", "Selective", "errors"]
__all__ += ["Attacker", "Ledger", "RenyiFilter", "Risk", "calibrate", "epsilon", "fisher", "fit_noise"]
__all__ += ["from_opacus", "individual_rdp", "rdp"]
__all__ += ["Confident", "NoisyMax"]
__all__ += ["Checkpoints", "Distributed", "Execution", "Logging", "PerInstance", "PrivateStep"]
__all__ += ["Randomness", "Source", "Units", "bound_contributions", "fix", "train"]
__all__ += ["Choice", "LogUniform", "Uniform", "tune"]
__all__ += ["NoisyLeastSquares", "mean", "public_thresholds"]
__all__ += sampling.__all__
__all__ += clipping.__all__
__all__ += noise.__all__

_LAZY = {
    "accounting.attacker": ("Attacker", "Risk"),
    "accounting.calibrate": ("calibrate", "fit_noise"),
    "accounting.epsilon": ("epsilon", "rdp"),
    "accounting.filters": ("RenyiFilter",),
    "accounting.ledger": ("Ledger",),
    "accounting.opacus": ("from_opacus",),
    "accounting.per_instance": ("fisher", "individual_rdp"),
    "gradients.fix": ("fix",),
    "pate.argmax": ("Confident", "NoisyMax"),
    "training.per_instance": ("PerInstance",),
    "training.source": ("Source",),
    "training.loop": ("train",),
    "training.methods.least_squares": ("NoisyLeastSquares",),
    "training.methods.statistics": ("mean",),
    "training.methods.public_bases": ("public_thresholds",),
    "training.options": ("Checkpoints", "Distributed", "Execution", "Logging", "Randomness", "Units"),
    "training.step": ("PrivateStep",),
    "training.trial": ("Choice", "LogUniform", "Uniform"),
    "training.tune": ("tune",),
    "training.units": ("bound_contributions",),
}
"""Names that need SciPy or torch, by module."""
_modules = lazy_modules(__name__)


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    return _modules(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
