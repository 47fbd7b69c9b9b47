"""Settings of a run of `hush train`, and its experiment: records, model, optimizer."""

import json
import math
from dataclasses import dataclass, field
from itertools import count as integers
from pathlib import Path
from typing import TYPE_CHECKING

from hush.core.atomic_files import check_folder
from hush.core.errors import CheckpointError, InvalidValue, shorten
from hush.core.guarantee import DELTA, Neighbours
from hush.core.plan import Plan
from hush.core.value import Value, count, number

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hush.gradients.tree import Views
    from hush.training.options import Units

_LEARNING_RATE = number(above=0, at_most=1e6, why="it is the length of a step", example=1.0)
_VIEWS = count("each is a pass over the record, clipped once for all", at_most=1024, example=4)
_MOMENTUM = number(at_least=0, below=1, why="at 1 no update decays", example=0.9)
LEARNING_RATE, MOMENTUM = _LEARNING_RATE["range"], _MOMENTUM["range"]


@dataclass(frozen=True, kw_only=True)
class Settings(Value):
    """Choices of `hush train` that are not in the plan file. None of them depends on the records."""

    data: str
    model: str
    delta: float = field(metadata=DELTA)
    learning_rate: float = field(metadata=_LEARNING_RATE)
    momentum: float = field(default=0.0, metadata=_MOMENTUM)
    features: str | None = None
    views: int | None = field(default=None, metadata=_VIEWS)
    public_records: int = field(default=0, metadata=count("they have no protection", at_least=0))
    secure: bool = False
    per_unit: int | None = field(default=None, metadata=count("a sampled owner has a record"))
    """Records of one owner per step, for user-level privacy. The owners are in no published file."""
    neighbours: Neighbours | None = None
    """None: zero-out."""
    records: int | None = field(default=None, metadata=count("the divisor of the update is public"))
    """Public constant in place of a private number of records."""

    @property
    def relation(self) -> Neighbours:
        return Neighbours(self.neighbours or Neighbours.ZERO_OUT)

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """The settings in the folder of a run of `hush train`."""
        from hush.training.run_folder import SETTINGS

        try:
            return cls.from_plain(json.loads((folder / SETTINGS).read_text()))
        except (OSError, ValueError, RecursionError) as error:  # HushError is a ValueError
            text = (
                f"{folder} has no readable {SETTINGS} ({shorten(str(error), 500)}). Name the folder of "
            )
            raise CheckpointError(f"{text}a run of `hush train`.") from None


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """The records of a run on their device, and how its model and optimizer are initialised."""

    settings: Settings
    train: "tuple[Tensor, Tensor]"
    test: "tuple[Tensor, Tensor]"
    public: "tuple[Tensor, Tensor] | None"
    views: "Views | None"
    classes: int
    units: "Units | None" = None
    """Owners of the private records (sensitive); None: each record is a unit of privacy."""

    def public_count(self) -> int:
        """Number of units of privacy, or the public constant in place of it."""
        from hush.training.units import public_count, units_of

        relation, records = self.settings.relation, self.settings.records
        if records is None and self.units is None and relation is not Neighbours.ADD_REMOVE:
            records = len(self.train[1])
        return public_count(records, units_of(self.units, relation), relation)

    def initialise(self) -> "tuple[nn.Module, torch.optim.Optimizer]":
        """A new model on the records' device, and its optimizer."""
        import torch

        from hush.models import build

        settings, inputs = self.settings, self.train[0]
        shape, kind = inputs.shape[1:], inputs.dtype
        model = build(settings.model, classes=self.classes, shape=shape, dtype=kind).to(inputs.device)
        rate, momentum = settings.learning_rate, settings.momentum
        return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def build_experiment(
    settings: Settings, data_dir: Path | None, device: "torch.device", units: Path | None = None
) -> Experiment:
    """The experiment of these settings and of a file with the owner of each training record."""
    from hush.data import flips_and_shifts, load, read_owners, tensors, with_features
    from hush.training.options import Units

    dataset = load(settings.data, data_dir)
    owners = None if units is None else read_owners(units, len(dataset.y_train))
    if settings.features is not None:
        dataset = with_features(dataset, settings.features, device=str(device), directory=data_dir)
    limit, public = len(dataset.y_train) - 1, settings.public_records
    if public > limit:
        raise InvalidValue(
            f"--public-records {public} must be > 0 and <= {limit}: public records have no protection, "
            "and no private record would be left. Pass e.g. --public-records 100."
        )
    if owners is not None and not set(owners[:public]).isdisjoint(owners[public:]):
        raise InvalidValue(
            f"--public-records {public} makes some records of an owner in {units} public and keeps "
            "others private. Order the records by owner, and pass a number that splits none."
        )
    views = None
    if settings.views is not None:
        if settings.features is not None or len(dataset.shape) != 3:
            kind = settings.data if settings.features is None else f"{settings.features} features"
            text = f"--views {settings.views} is for images, and {kind} are none. Leave it out."
            raise InvalidValue(text)
        # an eighth of the side: the usual 4 pixels of 32 would push most of 8 pixels out of sight
        views = flips_and_shifts(settings.views, shift=min(4, dataset.shape[-1] // 8))
    x, y, x_test, y_test = (part.to(device) for part in tensors(dataset))
    private = None
    if owners is not None and settings.per_unit is not None:
        private = Units(owners=owners[public:], per_unit=settings.per_unit)
    return Experiment(
        settings=settings,
        train=(x[public:], y[public:]),
        test=(x_test, y_test),
        public=(x[:public], y[:public]) if public else None,
        views=views,
        classes=dataset.classes,
        units=private,
    )


def folder_of(run_dir: Path | None, name: str) -> Path:
    """The folder of a run, which can be written to; by default a new one of this name, below runs."""
    new = (Path("runs") / f"{name}-{number}" for number in integers(1))
    folder = run_dir or next(path for path in new if not path.exists())
    # before any work, and without making a folder for a run that fails
    check_folder("--run-dir", next(p for p in (folder, *folder.absolute().parents) if p.exists()))
    return folder


def deviation(beta: float, scale: float) -> float:
    """Standard deviation of noise of density proportional to exp(-(|x| / scale)^beta)."""
    return scale * math.exp((math.lgamma(3 / beta) - math.lgamma(1 / beta)) / 2)


def signal_to_noise(plan: Plan, records: int, steps: int, dimension: int) -> float:
    """Upper bound on the ratio of the summed clipped gradients to the noise (root mean square norm).

    It is infinite for noise that has neither a density nor a dominating noise with one.
    """
    blocks = plan.clipping.sensitivity(dimension)
    variance = 0.0
    noises = plan.noise.per_block(blocks, plan.clipping.reference_norm)
    for block, (noise, norm) in zip(blocks, noises, strict=True):
        law = (noise.dominating_noise(norm) or noise).exponential_power(norm)
        if law is None:
            return math.inf
        variance += block.size * deviation(*law) ** 2
    signal = math.hypot(*(block.l2_radius for block in blocks)) * plan.sampling.expected(records)
    return math.sqrt(steps) * signal / math.sqrt(variance)
