"""Teachers of PATE: networks that are trained on disjoint records without noise, and stored in files.

Teachers are not private, so their files must stay secret.
"""

import copy
import hashlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hush.core.errors import DataError, Unsupported
from hush.core.value import Value, check_count, count, number
from hush.gradients.recording import draws_from
from hush.training import checkpoint
from hush.training.units import Owners, owner_ids

_RATE = number(above=0, at_most=10, why="it is the learning rate", example=5e-3)
Network = Callable[[], nn.Module]
"""Factory of new networks; must be picklable for training in several processes."""


def teacher_of(inputs: Tensor, targets: Tensor, teachers: int, units: Owners | None = None) -> Tensor:
    """Index of the teacher of each record, from a hash of the record or of its user id.

    Adding or removing a record (or a user) affects a single teacher.
    """
    if units is not None:
        ids = owner_ids(units)
        if len(ids) != len(inputs):
            raise DataError(
                f"the data has {len(inputs)} records and units has {len(ids)} ids. Pass one id per "
                "record, in the order of the records."
            )
        names, unit = np.unique(ids, return_inverse=True)
        contents, kind = [str(name).encode() for name in names.tolist()], "users"
    else:
        unit, kind = np.arange(len(inputs)), "records"
        contents = [
            record.numpy().tobytes() + int(target).to_bytes(8)
            for record, target in zip(inputs.cpu(), targets.tolist(), strict=True)
        ]
    check_count("teachers", teachers, "noise must hide the vote of each teacher", at_least=2)
    if teachers > len(contents):
        raise DataError(
            f"teachers={teachers} is more than the {len(contents)} {kind}: many teachers would be "
            f"untrained. Pass e.g. teachers={max(2, len(contents) // 20)}."
        )
    hashes = (hashlib.blake2b(content, digest_size=8).digest() for content in contents)
    return torch.tensor([int.from_bytes(each) % teachers for each in hashes])[torch.from_numpy(unit)]


@dataclass(frozen=True, kw_only=True)
class Lesson(Value):
    """Hyperparameters for training a teacher or the student with Adam."""

    epochs: int = field(default=40, metadata=count("it is a number of passes over the records"))
    batch: int = field(default=32, metadata=count("it is a number of records"))
    rate: float = field(default=5e-3, metadata=_RATE)


def new_network(network: Network) -> nn.Module:
    """Create a network; raise `Unsupported` if networks share trainable parameters."""
    with draws_from(0):
        first, second = network(), network()
    others = {id(parameter) for parameter in second.parameters()}
    for name, parameter in first.named_parameters():
        if parameter.requires_grad and id(parameter) in others:
            raise Unsupported(
                f"two calls of network() return models that share the parameter {name!r}: a record "
                "would change several teachers and votes. Build every layer inside network(), or "
                "copy a pretrained one there with copy.deepcopy(body)."
            )
    return first


def trained(network: Network, inputs: Tensor, targets: Tensor, lesson: Lesson, seed: int) -> nn.Module:
    """Create a network and train it without privacy. Without records it stays untrained."""
    generator, loss = torch.Generator().manual_seed(seed), nn.CrossEntropyLoss()
    with draws_from(seed):
        model = copy.deepcopy(network()).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=lesson.rate)
        for _ in range(lesson.epochs):
            for batch in torch.randperm(len(inputs), generator=generator).split(lesson.batch):
                if len(batch):
                    optimizer.zero_grad()
                    loss(model(inputs[batch]), targets[batch]).backward()
                    optimizer.step()
    return model.eval()


@torch.no_grad()
def predict(model: nn.Module, inputs: Tensor) -> Tensor:
    """Most likely class of each input."""
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
    """Train the teachers that have no file yet, each on the records that `teacher_of` assigns to it."""
    inputs, targets = data
    folder.mkdir(parents=True, exist_ok=True)
    missing = [teacher for teacher in range(teachers) if not _file(folder, teacher).exists()]
    for _ in range(teachers - len(missing)):
        done()
    jobs = (
        (_file(folder, each), network, inputs[assigned == each], targets[assigned == each], lesson, each)
        for each in missing
    )
    if processes == 1:
        for job in jobs:
            _train(*job)
            done()
        return
    # a fork would copy locks that are in use, and the state of generators
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for finished in as_completed([pool.submit(_train, *job) for job in jobs]):
            finished.result()
            done()


def _train(
    file: Path, network: Network, inputs: Tensor, targets: Tensor, lesson: Lesson, teacher: int
) -> None:
    model = trained(network, inputs, targets, lesson, teacher)
    checkpoint.save(file, {"weights": model.state_dict()})


def predictions(folder: Path, network: Network, teachers: int, inputs: Tensor) -> Tensor:
    """Predicted classes, one row per teacher and one column per input."""
    with draws_from(0):
        model = copy.deepcopy(network())
    predicted = []
    for teacher in range(teachers):
        model.load_state_dict(checkpoint.load(_file(folder, teacher))["weights"])
        predicted.append(predict(model, inputs))
    return torch.stack(predicted)


def _file(folder: Path, teacher: int) -> Path:
    return folder / f"{teacher:05d}.safetensors"
