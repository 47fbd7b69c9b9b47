"""What a run was made with, apart from its plan: kept beside it, so that it can be made again."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hush.core.atomic_files import replace_file
from hush.core.errors import CheckpointError, shorten
from hush.core.guarantee import DELTA
from hush.core.ranges import Range, check_count, check_kind
from hush.core.value import Value

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hush.gradients.recording import Views

_NAME = "settings.json"
RATE = Range(above=0, at_most=1e6, why="it is how far a step goes", example=1.0)
MOMENTUM = Range(at_least=0, below=1, why="at 1 no update is ever forgotten", example=0.9)


@dataclass(frozen=True, kw_only=True)
class Settings(Value):
    """The choices of `hush train` that are not in the plan file. None of them depends on the records."""

    data: str
    model: str
    delta: float = field(metadata=DELTA)
    learning_rate: float = field(metadata={"range": RATE})
    momentum: float = field(default=0.0, metadata={"range": MOMENTUM})
    adam: bool = False
    features: str | None = None
    views: int | None = None
    public_records: int = 0
    secure: bool = False

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

    def write(self, folder: Path) -> None:
        """Put them beside the plan."""
        replace_file(folder / _NAME, (json.dumps(self.to_plain()) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """Those of a run."""
        try:
            return cls.from_plain(json.loads((folder / _NAME).read_text()))
        except (OSError, ValueError, RecursionError) as error:  # HushError is a ValueError
            reason = shorten(str(error), 500)
            raise CheckpointError(
                f"{folder} has no {_NAME} that can be read ({reason}): what was trained is not known. "
                "Name the folder of a run that `hush train` has finished."
            ) from None


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """The records of a run, and how its model and optimizer begin."""

    settings: Settings
    train: "tuple[Tensor, Tensor]"
    test: "tuple[Tensor, Tensor]"
    public: "tuple[Tensor, Tensor] | None"
    views: "Views | None"
    classes: int

    def begin(self) -> "tuple[nn.Module, torch.optim.Optimizer]":
        """A new model, and its optimizer."""
        import torch

        from hush.models import build

        made, inputs = self.settings, self.train[0]
        network = build(made.model, classes=self.classes, shape=inputs.shape[1:]).to(inputs.device)
        if made.adam:
            return network, torch.optim.Adam(network.parameters(), lr=made.learning_rate)
        return network, torch.optim.SGD(
            network.parameters(), lr=made.learning_rate, momentum=made.momentum
        )


def rebuild_experiment(settings: Settings, data_dir: Path | None, place: "torch.device") -> Experiment:
    """What a run of these settings was given."""
    from hush.data import load, tensors
    from hush.data.features import with_features
    from hush.data.views import flips_and_shifts

    dataset = load(settings.data, data_dir)
    if settings.features is not None:
        dataset = with_features(dataset, settings.features, device=str(place), directory=data_dir)
    x, y, x_test, y_test = (part.to(place) for part in tensors(dataset))
    some = settings.public_records
    seen = settings.views
    return Experiment(
        settings=settings,
        train=(x[some:], y[some:]),
        test=(x_test, y_test),
        public=(x[:some], y[:some]) if some else None,
        views=None if seen is None else flips_and_shifts(seen, shift=min(4, x.shape[-1] // 8)),
        classes=dataset.classes,
    )
