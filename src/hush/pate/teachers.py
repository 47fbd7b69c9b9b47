"""Teachers: one network for each share of the records, trained on its own and kept in a file.

Teachers are not private. Their files are as secret as the records.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn

from hush.core.errors import CheckpointError
from hush.pate.fit import Lesson, fit, predict
from hush.pate.partition import teacher_of
from hush.training import checkpoint

Network = Callable[[], nn.Module]
"""Makes a new network; it must be picklable to be trained in another process."""


def train_teachers(
    folder: Path,
    network: Network,
    data: tuple[Tensor, Tensor],
    teachers: int,
    lesson: Lesson,
    *,
    processes: int = 1,
    done: Callable[[], None] = lambda: None,
) -> None:
    """Train those teachers whose file is not there yet; `done` is called as each is finished."""
    inputs, targets = data
    owner = teacher_of(inputs, targets, teachers)
    folder.mkdir(parents=True, exist_ok=True)
    missing = [number for number in range(teachers) if not _file(folder, number).exists()]
    for _ in range(teachers - len(missing)):
        done()
    jobs = (
        (folder, network, inputs[owner == number], targets[owner == number], lesson, number)
        for number in missing
    )
    if processes == 1:
        for job in jobs:
            _train(*job)
            done()
        return
    # Spawned, not forked: a fork would copy the threads' locks and the generators' state.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_alone) as pool:
        for finished in as_completed([pool.submit(_train, *job) for job in jobs]):
            finished.result()
            done()


def opinions(folder: Path, network: Network, teachers: int, inputs: Tensor) -> Tensor:
    """The class that each teacher (a row) gives each input (a column)."""
    model = network()
    each = []
    for number in range(teachers):
        try:
            model.load_state_dict(checkpoint.load(_file(folder, number))["weights"])
        except (RuntimeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{_file(folder, number)} is not a teacher of this run ({error}): its vote would be "
                "another network's. Remove the file to train that teacher again."
            ) from None
        each.append(predict(model, inputs))
    return torch.stack(each)


def votes(given: Tensor, classes: int) -> Tensor:
    """How many teachers vote for each class, a row an input."""
    return nn.functional.one_hot(given, classes).sum(0).double()


def _train(
    folder: Path, network: Network, inputs: Tensor, targets: Tensor, lesson: Lesson, number: int
) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        model = network()
        fit(model, inputs, targets, lesson, seed=number)
    checkpoint.save(_file(folder, number), {"weights": model.state_dict()})


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number:05d}.safetensors"


def _alone() -> None:
    torch.set_num_threads(1)
