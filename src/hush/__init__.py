"""hush: differential privacy for PyTorch, every epsilon proved.

The parts of a plan, guarantees and errors import at once; names that need SciPy or torch are loaded when
they are first used, so that `import hush` costs neither.
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
    from hush.accounting.calibrate import calibrate
    from hush.accounting.epsilon import epsilon, rdp
    from hush.accounting.filters import RenyiFilter
    from hush.accounting.ledger import Ledger
    from hush.accounting.per_instance import fisher, individual_rdp
    from hush.accounting.shaping import fit_noise
    from hush.pate.argmax import Confident, NoisyMax
    from hush.training.loop import train
    from hush.training.methods.least_squares import NoisyLeastSquares
    from hush.training.methods.moments import NoisyMoments, NoisyWhitening
    from hush.training.methods.statistics import NoisyQuantile, individual_mean, mean
    from hush.training.options import (
        Checkpoints,
        Distributed,
        Execution,
        Logging,
        Randomness,
        Units,
    )
    from hush.training.source import Source
    from hush.training.step import PrivateStep
    from hush.training.tuning.trial import Choice, LogUniform, Uniform
    from hush.training.tuning.tune import tune

__version__ = "0.1.0"

__all__ = [
    "Adjacency",
    "Always",
    "Attacker",
    "BestOf",
    "Bound",
    "Budget",
    "Checkpoints",
    "Choice",
    "Confident",
    "Distributed",
    "Execution",
    "Guarantee",
    "Ledger",
    "LogUniform",
    "Logging",
    "Neighbours",
    "NoisyLeastSquares",
    "NoisyMax",
    "NoisyMoments",
    "NoisyQuantile",
    "NoisyWhitening",
    "Plan",
    "PrivacyWarning",
    "PrivateStep",
    "Randomness",
    "RenyiFilter",
    "Risk",
    "Selective",
    "Source",
    "Uniform",
    "Units",
    "calibrate",
    "epsilon",
    "errors",
    "fisher",
    "fit_noise",
    "individual_mean",
    "individual_rdp",
    "mean",
    "rdp",
    "train",
    "tune",
]
__all__ += sampling.__all__
__all__ += clipping.__all__
__all__ += noise.__all__

_LAZY = {
    "Attacker": "accounting.attacker",
    "Checkpoints": "training.options",
    "Choice": "training.tuning.trial",
    "Confident": "pate.argmax",
    "Ledger": "accounting.ledger",
    "NoisyLeastSquares": "training.methods.least_squares",
    "Distributed": "training.options",
    "Execution": "training.options",
    "Logging": "training.options",
    "LogUniform": "training.tuning.trial",
    "NoisyMax": "pate.argmax",
    "NoisyMoments": "training.methods.moments",
    "NoisyQuantile": "training.methods.statistics",
    "NoisyWhitening": "training.methods.moments",
    "PrivateStep": "training.step",
    "Randomness": "training.options",
    "RenyiFilter": "accounting.filters",
    "Risk": "accounting.attacker",
    "Uniform": "training.tuning.trial",
    "Units": "training.options",
    "Source": "training.source",
    "calibrate": "accounting.calibrate",
    "epsilon": "accounting.epsilon",
    "fisher": "accounting.per_instance",
    "fit_noise": "accounting.shaping",
    "individual_mean": "training.methods.statistics",
    "individual_rdp": "accounting.per_instance",
    "mean": "training.methods.statistics",
    "rdp": "accounting.epsilon",
    "train": "training.loop",
    "tune": "training.tuning.tune",
}


_modules = lazy_modules(__name__)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    return _modules(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
