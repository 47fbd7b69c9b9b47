"""Facts that must be equal on all ranks, and their comparison: the step, the data, the draw."""

import zlib
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from hush.core.errors import DataError
from hush.core.plan import plan_text
from hush.core.randomness import SystemSource
from hush.gradients.losses import criterion_of
from hush.training.checkpoint import run_facts, settings_digest
from hush.training.data import (
    Batch,
    Data,
    as_source,
    count,
    data_digest,
    describe_record,
    held_slots,
    pair_of,
)
from hush.training.distributed.processes import Facts, Processes
from hush.training.fingerprint import fingerprint
from hush.training.records import base_dataset
from hush.training.reducer import Placement

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


def step_facts(step: "PrivateStep", generator: torch.Generator | None) -> Facts:
    """Facts of a new step, before its first draw."""
    from hush import __version__

    parameters = [
        f"{name} {tuple(value.shape)} {value.dtype} {value.requires_grad} "
        f"{getattr(value, 'placements', None)}"
        for name, value in step.model.named_parameters()
    ]
    public = None if step.basis_schedule is None else pair_of(step.basis_schedule.public)
    return {
        **run_facts(step),
        "hush and torch": f"{__version__}, {torch.__version__}",
        "plan": plan_text(step.plan).replace("\n", " ").strip(),
        "units": str(step.units and step.units.digest).encode(),  # owners may be private
        "neighbours": str(step.adjacency),
        "shard": step.reducer.shard,
        "model": f"{type(step.model).__name__} of {'; '.join(parameters)}",
        "the model's weights": weights_digest(step.model),
        "loss": _describe_loss(criterion_of(step.gradients.loss)),
        "the seed": str(generator and generator.initial_seed()).encode(),
        "public records": None if public is None else fingerprint(part.cpu() for part in public),
        "kind of device": step.device.type,
    }


def draw_facts(step: "PrivateStep", batch: Batch, *, adopted: bool) -> Facts:
    """Facts of a draw, and of the step's state before the sum; `adopted`: weights were set since."""
    source, kind = step.generator, step.device.type
    return {
        "the number of steps": step.steps,
        "the slots drawn": fingerprint([batch.indices]).encode(),
        "the stream of draws": (
            b"" if isinstance(source, SystemSource) else fingerprint([source.get_state()]).encode()
        ),
        "trained parameters": step.size,
        "settings of the optimizer": settings_digest(step.optimizer),
        "adopted weights": weights_digest(step.model) if adopted else None,
        "train() and eval() modes": zlib.crc32(bytes(m.training for m in step.model.modules())),
        "autocast": torch.is_autocast_enabled(kind) and str(torch.get_autocast_dtype(kind)),
    }


def weights_digest(model: nn.Module) -> str:
    """Hash of the weights and of all buffers."""
    return tensors_digest({**model.state_dict(), **dict(model.named_buffers())}.values())


def tensors_digest(values: Iterable[Any]) -> str:
    """Hash of the tensors among the values; shards are on one rank each and not included."""
    tensors = (value for value in values if isinstance(value, Tensor))
    return fingerprint(value.cpu() for value in tensors if not hasattr(value, "placements"))


def _describe_loss(loss: Any) -> str:
    """Name of a loss; of a module also its settings and a hash of its tensors, such as class weights."""
    if not isinstance(loss, nn.Module):
        return str(getattr(loss, "__qualname__", type(loss).__qualname__))
    plain, state = (bool, int, float, str), loss.state_dict()
    settings = {name: value for name, value in vars(loss).items() if isinstance(value, plain)}
    hashed = tensors_digest(state.values())
    return f"{type(loss).__qualname__} {settings} with {', '.join(state)} of hash {hashed}"


def place(data: Data, processes: Processes, *, shard: bool) -> Placement:
    """Place of this rank's data among all slots, after a comparison of the data of all ranks."""
    held = held_slots(data) if shard else count(data)
    described, digest = (describe_record(data), data_digest(data, held)) if held else (None, None)
    if not shard:
        facts = {
            "the number of records": str(held).encode(),  # private under ADD_REMOVE
            "the kind of record": described,
            "which record is in which slot": str(digest).encode(),
        }
        processes.agree("comparing the data", facts)
        return Placement(0, held, held)
    # of a Subset: digest of the data set that it refers to, and its indices there
    base, numbers = None, None
    if held and pair_of(data) is None and isinstance((source := as_source(data)).dataset, Subset):
        dataset, indices = base_dataset(source.dataset)
        whole = replace(source, dataset=dataset, present=None)
        base, numbers = data_digest(whole, count(whole)), np.asarray(indices, np.int64)
    parts = processes.gather("comparing the data", (held, described, digest, base, numbers))
    _check_parts(parts)
    sizes = [part[0] for part in parts]
    return Placement(sum(sizes[: processes.rank]), held, sum(sizes))


def _check_parts(parts: list[tuple[Any, ...]]) -> None:
    """Raise unless the ranks hold parts of one data set without a common record, as far as is known."""
    filled = [(rank, part) for rank, part in enumerate(parts) if part[0]]
    if not filled:
        raise DataError("no rank has a record to train on. Pass at least one.")
    for (rank, ours), (other, theirs) in combinations(filled, 2):
        if ours[1] != theirs[1]:
            raise DataError(
                f"ranks {rank} and {other} have records of {ours[1]} and {theirs[1]}: they cannot train "
                "one model. Pass parts of one data set."
            )
        same = ours[2] is not None and ours[:3] == theirs[:3] and ours[0] > 1
        if ours[3] is not None and ours[3] == theirs[3]:
            same = same or len(np.intersect1d(ours[4], theirs[4])) > 0
        if same:
            raise DataError(
                f"ranks {rank} and {other} hold the same records, which would count several times and "
                "cost more than is charged. Cut the data once, without repeating records to make parts "
                "equal (as DistributedSampler does), e.g. data[rank::ranks]; or leave shard out."
            )
