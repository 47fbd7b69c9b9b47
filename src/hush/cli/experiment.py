"""Settings of `hush train`, and the data, model and optimizer of a run."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count as integers
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hush.core.atomic_files import check_folder
from hush.core.errors import CheckpointError, InvalidValue, Unsupported, shorten
from hush.core.guarantee import DELTA, Neighbours
from hush.core.value import Value, count, number
from hush.schema import Image, schema_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hush.training.data import Data
    from hush.training.options import Units
    from hush.training.tables import EncodedTable

_LEARNING_RATE = number(above=0, at_most=1e6, why="it is the length of a step", example=1.0)
_MOMENTUM = number(at_least=0, below=1, why="at 1 no update decays", example=0.9)
LEARNING_RATE, MOMENTUM = _LEARNING_RATE["range"], _MOMENTUM["range"]
T = TypeVar("T")
_IN_MEMORY = 2**30
"""Maximum size in bytes of encoded records in memory. Larger tables are read step by step."""


def read_settings(folder: Path, convert: Callable[[dict[str, Any]], T]) -> T:
    """Read the settings of a run from its folder, and convert them from plain data."""
    from hush.training.run_folder import SETTINGS

    try:
        return convert(json.loads((folder / SETTINGS).read_text()))
    except (OSError, ValueError, RecursionError) as error:  # HushError is a ValueError
        text = f"{folder} has no readable {SETTINGS} ({shorten(str(error), 500)}). Pass the folder of "
        raise CheckpointError(f"{text}a run of `hush train`.") from None


@dataclass(frozen=True, kw_only=True)
class Settings(Value):
    """Options of `hush train` that are not in the plan file. No option depends on the records."""

    data: str
    model: str
    delta: float = field(metadata=DELTA)
    learning_rate: float = field(metadata=_LEARNING_RATE)
    momentum: float = field(default=0.0, metadata=_MOMENTUM)
    features: str | None = None
    public_records: int = field(default=0, metadata=count("they have no protection", at_least=0))
    per_unit: int | None = field(default=None, metadata=count("a sampled owner has a record"))
    """Maximum number of records of one user per step; None for record-level privacy."""
    neighbours: Neighbours | None = None
    """Adjacency relation; None is zero-out."""
    records: int | None = field(default=None, metadata=count("the divisor of the update is public"))
    """Public estimate of a private number of records."""
    target: tuple[str, ...] | None = field(
        default=None, metadata={"check": lambda name, value: tuple(value)}
    )
    """Target columns of a file."""
    schema: dict[str, Any] | None = None
    """Public schema of a file, as plain data."""

    @property
    def relation(self) -> Neighbours:
        return Neighbours(self.neighbours or Neighbours.ZERO_OUT)

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        """Read the settings of a run of `hush train` from its folder."""
        return read_settings(folder, cls.from_plain)


@dataclass(frozen=True, kw_only=True, eq=False)
class Experiment:
    """Data, model and optimizer of a run."""

    settings: Settings
    train: "Data"
    test: "Data | None"
    outputs: int
    """Number of classes, labels or numbers."""
    loss: "nn.Module"
    device: "torch.device"
    public: "tuple[Tensor, Tensor] | None" = None
    units: "Units | None" = None
    """User ids of the private records (sensitive); None for record-level privacy."""

    def tensors(self, command: str) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
        """Inputs and labels of training and test records; raise if they are not in memory."""
        import torch

        classes = isinstance(self.loss, torch.nn.CrossEntropyLoss)
        if isinstance(self.train, tuple) and isinstance(self.test, tuple) and classes:
            return *self.train, *self.test
        raise Unsupported(
            f"{command} needs classes as targets, test records (--test-data), and training records that "
            "fit into memory."
        )

    @property
    def slots(self) -> int:
        """Number of private training records."""
        from hush.training.data import count

        return count(self.train)

    def public_count(self) -> int:
        """Public number of records or users, or a public estimate."""
        from hush.training.units import public_count, units_of

        relation, records = self.settings.relation, self.settings.records
        if records is None and self.units is None and relation is not Neighbours.ADD_REMOVE:
            records = self.slots
        return public_count(records, units_of(self.units, relation), relation)

    def initialise(self) -> "tuple[nn.Module, torch.optim.Optimizer]":
        """Create a model on the device of the records, and its optimizer."""
        import torch

        from hush.models import build
        from hush.training.data import zero_record

        settings, inputs = self.settings, zero_record(self.train)[0]
        shape, kind = inputs.shape[1:], inputs.dtype
        model = build(settings.model, classes=self.outputs, shape=shape, dtype=kind).to(self.device)
        rate, momentum = settings.learning_rate, settings.momentum
        return model, torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def build_experiment(
    settings: Settings,
    data_dir: Path | None,
    device: "torch.device",
    units: Path | None = None,
    test_data: Path | None = None,
) -> Experiment:
    """Create the experiment for these settings.

    Args:
        settings: Settings of the run.
        data_dir: Folder with the data files; None for $HUSH_DATA.
        device: Device of the records and the model.
        units: File with the user id of each training record; None for record-level privacy.
        test_data: File of test records, if the data set is a file.
    """
    if "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise Unsupported(
            f"a launcher such as torchrun started {os.environ['WORLD_SIZE']} processes, but a command "
            "of hush trains in one process: each would train and charge a separate model. Start it "
            "without the launcher. For several GPUs, call hush.train in a script (docs/distributed.md)."
        )
    from hush.data import read_owners
    from hush.training.options import Units

    read = _named if settings.schema is None else _from_file
    experiment = read(settings, data_dir if settings.schema is None else test_data, device)
    limit, public = experiment.slots - 1, settings.public_records
    owners = None if units is None else read_owners(units, experiment.slots)
    if public > limit:
        raise InvalidValue(
            f"--public-records {public} must be > 0 and <= {limit}: at least one record must be "
            "private. Pass e.g. --public-records 100."
        )
    if owners is not None and not set(owners[:public]).isdisjoint(owners[public:]):
        raise InvalidValue(
            f"--public-records {public} makes only some records of a user in {units} public. "
            "Order the records by user, and pass a number that does not split a user."
        )
    private = None
    if owners is not None and settings.per_unit is not None:
        private = Units(owners=owners[public:], per_unit=settings.per_unit)
    experiment = replace(experiment, units=private)
    if not public:
        return experiment
    x, y, *_ = experiment.tensors("--public-records")
    return replace(experiment, train=(x[public:], y[public:]), public=(x[:public], y[:public]))


def _named(settings: Settings, data_dir: Path | None, device: "torch.device") -> Experiment:
    """Experiment on a named data set, or on features of it."""
    import torch

    from hush.data import load, tensors, with_features

    dataset = load(settings.data, data_dir)
    if settings.features is not None:
        dataset = with_features(dataset, settings.features, device=str(device), directory=data_dir)
    x, y, x_test, y_test = (part.to(device) for part in tensors(dataset))
    return Experiment(
        settings=settings,
        train=(x, y),
        test=(x_test, y_test),
        outputs=dataset.classes,
        loss=torch.nn.CrossEntropyLoss(),
        device=device,
    )


def _from_file(settings: Settings, test_data: Path | None, device: "torch.device") -> Experiment:
    """Experiment on a file, encoded by the schema in the settings."""
    from torch import nn

    from hush.training.source import Source
    from hush.training.tables import EncodedTable, open_table

    def records(path: str | Path) -> "tuple[EncodedTable, Data]":
        table = EncodedTable(open_table(path), schema_of(settings.schema or {}), settings.target or ())
        size = len(table) * table.rows([0])[0].nbytes
        if size > _IN_MEMORY:
            return table, Source(table)
        inputs, targets = table.whole()
        return table, (inputs.to(device), targets.to(device))

    table, train = records(settings.data)
    loss = nn.MSELoss() if table.numeric else nn.BCEWithLogitsLoss()
    return Experiment(
        settings=settings,
        train=train,
        test=None if test_data is None else records(test_data)[1],
        outputs=table.outputs,
        loss=nn.CrossEntropyLoss() if table.classes else loss,
        device=device,
    )


def model_of(model: str | None, data: str, features: str | None, schema: dict[str, Any] | None) -> str:
    """Name of the network: `model`, if it can be imported, or the default network."""
    from hush.models import default_model, network_of

    if model is None and schema is not None:
        images = any(isinstance(each, Image) for each in schema_of(schema).values())
        return "cnn" if images else "linear"
    name = model or default_model(data, features)
    network_of(name)
    return name


def folder_of(run_dir: Path | None, name: str) -> Path:
    """Writable folder of a run; by default a new folder `runs/name-N`."""
    new = (Path("runs") / f"{name}-{number}" for number in integers(1))
    folder = run_dir or next(path for path in new if not path.exists())
    # check before training, without creating the folder
    check_folder("--run-dir", next(p for p in (folder, *folder.absolute().parents) if p.exists()))
    return folder
