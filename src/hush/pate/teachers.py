"""PATE's teachers: one network a share of the records, trained without privacy and stored in a file.

Teachers are not private. Their files are as secret as the records.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hush.core.errors import CheckpointError, DataError
from hush.core.value import Value, check_count, number
from hush.training import checkpoint
from hush.training.units import Owners, owner_ids

Network = Callable[[], nn.Module]
"""Makes a new network; it must be picklable to be trained in another process."""


def teacher_of(inputs: Tensor, targets: Tensor, teachers: int, units: Owners | None = None) -> Tensor:
    """Index of the teacher that each record belongs to, a function of the record or its owner alone.

    A hash of the record's content, so that adding or removing a record changes one teacher only; shares
    cut by position would all shift. With owners, a hash of the owner's id: all records of a user are
    with one teacher, and stay there whoever else comes or goes. Shares are of about equal size, in
    records or in users; if they were evened out by numbers of records, one user more would move others.
    """
    if units is not None:
        ids = owner_ids(units)
        if len(ids) != len(inputs):
            raise DataError(
                f"the data has {len(inputs)} records and units has {len(ids)} ids: records of a user "
                "with several teachers would have several votes. Pass one id a record, in the order of "
                "the records."
            )
        names, unit = np.unique(ids, return_inverse=True)
        check_teachers(teachers, len(names), "users")
        assigned = torch.tensor([_hash(str(name).encode()) % teachers for name in names.tolist()])
        return assigned[torch.from_numpy(unit)]
    check_teachers(teachers, len(inputs))
    return torch.tensor(
        [
            _hash(record.numpy().tobytes() + int(target).to_bytes(8)) % teachers
            for record, target in zip(inputs.cpu(), targets.tolist(), strict=True)
        ]
    )


def check_teachers(teachers: int, count: int, units: str = "records") -> None:
    """Raise unless there are at least two teachers and a record, or a user, for each."""
    check_count("teachers", teachers, "one teacher's vote is what noise hides", at_least=2)
    if teachers > count:
        raise DataError(
            f"teachers={teachers} is more than the {count} {units}: most teachers would have learned "
            f"nothing, and their votes drown the others. Pass e.g. teachers={max(2, count // 20)}."
        )


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


@dataclass(frozen=True, kw_only=True)
class Lesson(Value):
    """Hyperparameters of a teacher's or student's training with Adam."""

    epochs: int = 40
    batch: int = 32
    rate: float = field(
        default=5e-3,
        metadata=number(above=0, at_most=10, why="it is how far a step goes", example=5e-3),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "batch"):
            whole = check_count(name, getattr(self, name), "it is counted", at_least=1)
            object.__setattr__(self, name, whole)


def fit(model: nn.Module, inputs: Tensor, targets: Tensor, lesson: Lesson, seed: int) -> None:
    """Train the model in place, without privacy; without records it stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lesson.rate)
    loss = nn.CrossEntropyLoss()
    model.train()
    for _ in range(lesson.epochs):
        for batch in torch.randperm(len(inputs), generator=generator).split(lesson.batch):
            if len(batch):
                optimizer.zero_grad()
                loss(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()
    model.eval()


@torch.no_grad()
def predict(model: nn.Module, inputs: Tensor) -> Tensor:
    """The most likely class of each input."""
    model.eval()
    return torch.cat([model(part).argmax(1) for part in inputs.split(1024)])


def train_teachers(
    folder: Path,
    network: Network,
    data: tuple[Tensor, Tensor],
    assigned: Tensor,
    teachers: int,
    lesson: Lesson,
    *,
    processes: int = 1,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Train the teachers whose file is missing, each on the records assigned to it.

    Args:
        folder: of the teachers' files.
        network: makes a new teacher.
        data: private inputs and targets.
        assigned: `teacher_of` of the records.
        teachers: how many.
        lesson: hyperparameters.
        processes: teachers trained at once.
        done: called as each is finished.
    """
    inputs, targets = data
    folder.mkdir(parents=True, exist_ok=True)
    missing = [teacher for teacher in range(teachers) if not _file(folder, teacher).exists()]
    for _ in range(teachers - len(missing)):
        done()
    jobs = (
        (folder, network, inputs[assigned == teacher], targets[assigned == teacher], lesson, teacher)
        for teacher in missing
    )
    if processes == 1:
        for job in jobs:
            _train(*job)
            done()
        return
    # Spawned, not forked: a fork would copy the threads' locks and the generators' state.
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_one_thread
    ) as pool:
        for finished in as_completed([pool.submit(_train, *job) for job in jobs]):
            finished.result()
            done()


def predictions(folder: Path, network: Network, teachers: int, inputs: Tensor) -> Tensor:
    """Predicted classes, a row a teacher and a column an input."""
    model = network()
    predicted = []
    for teacher in range(teachers):
        try:
            model.load_state_dict(checkpoint.load(_file(folder, teacher))["weights"])
        except (RuntimeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{_file(folder, teacher)} is not a teacher of this run ({error}): its vote would be "
                "another network's. Remove the file to train that teacher again."
            ) from None
        predicted.append(predict(model, inputs))
    return torch.stack(predicted)


def votes(predicted: Tensor, classes: int) -> Tensor:
    """Vote counts, a row an input and a column a class."""
    return nn.functional.one_hot(predicted, classes).sum(0).double()


def _train(
    folder: Path, network: Network, inputs: Tensor, targets: Tensor, lesson: Lesson, teacher: int
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(teacher)
        model = network()
        fit(model, inputs, targets, lesson, seed=teacher)
    checkpoint.save(_file(folder, teacher), {"weights": model.state_dict()})


def _file(folder: Path, teacher: int) -> Path:
    return folder / f"{teacher:05d}.safetensors"


def _one_thread() -> None:
    torch.set_num_threads(1)
