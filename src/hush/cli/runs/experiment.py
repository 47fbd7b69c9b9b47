"""Settings of a run, and the experiment they describe: records, model, optimizer.

`hush train` and `hush audit` both build the experiment here: an audit trains what the run trained.
"""

import json
import math
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hush.core.errors import CheckpointError, InvalidPlan, InvalidValue, shorten
from hush.core.guarantee import DELTA, Adjacency, Budget, Neighbours, check_neighbours
from hush.core.plan import Plan, read_plan
from hush.core.value import Range, Value, check_count, check_kind

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from hush.gradients.tree import Views
    from hush.gradients.units import Reduction
    from hush.training.options import Units

LEARNING_RATE = Range(above=0, at_most=1e6, why="it is how far a step goes", example=1.0)
MOMENTUM = Range(at_least=0, below=1, why="at 1 no update is ever forgotten", example=0.9)


@dataclass(frozen=True, kw_only=True)
class Settings(Value):
    """The choices of `hush train` that are not in the plan file. None of them depends on the records."""

    data: str
    model: str
    delta: float = field(metadata=DELTA)
    learning_rate: float = field(metadata={"range": LEARNING_RATE})
    momentum: float = field(default=0.0, metadata={"range": MOMENTUM})
    adam: bool = False
    features: str | None = None
    views: int | None = None
    public_records: int = 0
    secure: bool = False
    per_unit: int | None = None
    """Records of one owner a step, where owners are protected; who they are is in no file to publish."""
    unit_gradient: str | None = None
    """None: mean."""
    neighbours: Neighbours | None = None
    """None: zero-out."""
    records: int | None = None
    """Public constant in place of a private number of records."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("data", "model"):
            check_kind(name, getattr(self, name), str)
        for name in ("adam", "secure"):
            check_kind(name, getattr(self, name), bool)
        check_count("public_records", self.public_records, "records are counted", at_least=0)
        if self.features is not None:
            check_kind("features", self.features, str)
        if self.views is not None:
            check_count("views", self.views, "views of a record are averaged", at_least=1)
        # a default that is spelled out is the default: runs with and without it are one
        if self.neighbours is not None:
            relation = check_neighbours(self.neighbours)
            chosen = None if relation is Neighbours.ZERO_OUT else relation
            object.__setattr__(self, "neighbours", chosen)
        if self.unit_gradient == "mean":
            object.__setattr__(self, "unit_gradient", None)
        for name, why in (("per_unit", "records of an owner"), ("records", "records or owners")):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), f"{why} are counted", at_least=1)
        if self.unit_gradient is not None:
            check_kind("unit_gradient", self.unit_gradient, str)

    @property
    def relation(self) -> Neighbours:
        """Adjacency relation of the run."""
        return Neighbours.ZERO_OUT if self.neighbours is None else self.neighbours

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """The settings in a run's folder, which `hush train` keeps there as the run begins."""
        from hush.training.run_folder import SETTINGS

        try:
            return cls.from_plain(json.loads((folder / SETTINGS).read_text()))
        except (OSError, ValueError, RecursionError) as error:  # HushError is a ValueError
            reason = shorten(str(error), 500)
            raise CheckpointError(
                f"{folder} has no {SETTINGS} that can be read ({reason}): what was trained is not "
                "known. Name the folder of a run of `hush train`."
            ) from None


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """The records of a run on their device, and how its model and optimizer are initialised."""

    settings: Settings
    train: "tuple[Tensor, Tensor]"
    test: "tuple[Tensor, Tensor]"
    public: "tuple[Tensor, Tensor] | None"
    views: "Views | None"
    classes: int
    owners: "NDArray[Any] | None" = None
    """Owner of each private record (sensitive)."""

    @property
    def units(self) -> "Units | None":
        """Owners of the records; None if each record is a unit of privacy."""
        from hush.training.options import Units

        chosen = self.settings
        if self.owners is None or chosen.per_unit is None:
            return None
        reduction = cast("Reduction", chosen.unit_gradient or "mean")
        return Units(owners=self.owners, per_unit=chosen.per_unit, gradient=reduction)

    def public_count(self) -> int:
        """Number of units of privacy, or the public constant for it: rates and steps follow it."""
        from hush.training.units import public_count, units_of

        settings, relation = self.settings, self.settings.relation
        units = units_of(self.units, relation)
        length_public = units is None and relation is not Neighbours.ADD_REMOVE
        if settings.records is None and length_public:
            return len(self.train[1])
        return public_count(settings.records, units, relation)

    def initialise(self) -> "tuple[nn.Module, torch.optim.Optimizer]":
        """A new model on the records' device, and its optimizer."""
        import torch

        from hush.models import build

        settings, inputs = self.settings, self.train[0]
        shape, kind = inputs.shape[1:], inputs.dtype
        model = build(settings.model, classes=self.classes, shape=shape, dtype=kind).to(inputs.device)
        if settings.adam:
            return model, torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
        return model, torch.optim.SGD(
            model.parameters(), lr=settings.learning_rate, momentum=settings.momentum
        )


def build_experiment(
    settings: Settings, data_dir: Path | None, device: "torch.device", units: Path | None = None
) -> Experiment:
    """The experiment of these settings; raises where they do not fit the data.

    Args:
        settings: the run's, from options or from its folder.
        data_dir: folder with the data files; None: the environment's HUSH_DATA.
        device: where the records go.
        units: file with the owner of each training record; None: each record is its own.
    """
    from hush.data import flips_and_shifts, load, read_owners, tensors, with_features

    dataset = load(settings.data, data_dir)
    owners = None if units is None else read_owners(units, len(dataset.y_train))
    if settings.features is not None:
        dataset = with_features(dataset, settings.features, device=str(device), directory=data_dir)
    limit, public = len(dataset.y_train) - 1, settings.public_records
    if public > limit:
        raise InvalidValue(
            f"--public-records {public} must be > 0 and <= {limit}: public records have no protection, "
            "and someone is to be left to protect. Pass e.g. --public-records 100."
        )
    if owners is not None and not set(owners[:public]).isdisjoint(owners[public:]):
        raise InvalidValue(
            f"--public-records {public} gives up some records of an owner in {units} and keeps others "
            "(who it is is private and not shown): what is public about an owner has no protection, and "
            "the guarantee assumes that nobody is in both parts. Order the records so that those of an "
            "owner follow each other and pass a number that splits none, or leave --public-records out."
        )
    views = None
    if settings.views is not None:
        if settings.features is not None or len(dataset.shape) != 3:
            kind = settings.data if settings.features is None else f"{settings.features} features"
            raise InvalidValue(
                f"--views {settings.views} is for images, and {kind} are none: shifts and flips would "
                "make other records of them. Leave it out."
            )
        # an eighth of the side: the usual 4 pixels of 32 would push most of 8 pixels out of sight
        views = flips_and_shifts(settings.views, shift=min(4, dataset.shape[-1] // 8))
    x, y, x_test, y_test = (part.to(device) for part in tensors(dataset))
    return Experiment(
        settings=settings,
        train=(x[public:], y[public:]),
        test=(x_test, y_test),
        public=(x[:public], y[:public]) if public else None,
        views=views,
        classes=dataset.classes,
        owners=None if owners is None else owners[public:],
    )


def check_same_plan(
    folder: Path,
    plan: Plan,
    budget: Budget,
    steps: int | None,
    dimension: int,
    adjacency: Adjacency,
) -> None:
    """Raise if the run in a folder has another plan, with what differs and how to go on under its own.

    Args:
        folder: of the run to resume; one without a plan file passes.
        plan: of the options. Noise calibrated for another number of steps is another plan.
        budget: epsilon and delta of the whole run.
        steps: number of steps in all; None: as many as the budget allows.
        dimension: number of parameters.
        adjacency: what neighbours of the budget differ in.
    """
    from hush.accounting.calibrate import max_steps
    from hush.accounting.epsilon import compose
    from hush.accounting.mechanism import grows_with_dimension
    from hush.training.run_folder import differences

    file = folder / "plan.toml"
    charged = read_plan(file) if file.exists() else plan
    if charged == plan:
        return
    sizes = {charged: dimension} if grows_with_dimension(charged) else {}
    allowed = max_steps(charged, budget, {}, sizes, adjacency)
    count = max(allowed, steps or 0)  # fewer than the budget pays for are a matter of --steps alone
    cost = compose({charged: count}, budget.delta, sizes, adjacency).epsilon.upper
    needed = budget.epsilon if count == allowed else math.ceil(cost * 1000) / 1000
    raise InvalidPlan(
        f"{file} is another plan than these options stand for ({differences(charged, plan)}): a run "
        "keeps the plan it was charged for, and without --noise or --plan the noise is chosen for "
        f"--epsilon, --delta and the steps. Epsilon {budget.epsilon:g} pays for {allowed} steps of that "
        f"plan in all; {count} steps of it cost epsilon {cost:.4g}. Go on under it with --plan {file} "
        f"--steps {count} --epsilon {needed:g}, in place of options for noise, rate and clip; sound if "
        "nothing that the run released decided how many steps there are. Or name another --run-dir."
    )


def new_folder(name: str) -> Path:
    """The first folder of this name and a number, below runs, that does not exist."""
    return next(path for n in count(1) if not (path := Path("runs") / f"{name}-{n}").exists())
