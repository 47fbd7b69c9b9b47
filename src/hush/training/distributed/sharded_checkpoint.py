"""Checkpoints of a step whose parameters are sharded, by `torch.distributed.checkpoint`.

Every rank writes its shards of the weights and of the optimizer's state, and rank 0 the rest of the
step's state, a small file that names them and is replaced at the end: a run that dies in between has
the checkpoint before. It may be read by another number of ranks, by ranks with the whole model, or by
one process.
"""

import os
import secrets
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from hush.core.errors import CheckpointError, shorten
from hush.core.value import as_path
from hush.training import checkpoint
from hush.training.checkpoint import load_state, state_of
from hush.training.reducer import Local

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

_STATE = "step.safetensors"
_WEIGHTS = "weights-"


def save(step: "PrivateStep", directory: str | os.PathLike[str]) -> None:
    """Write a step's checkpoint into a folder that all ranks reach; every rank calls it.

    It holds the generator's state, from which noise can be computed: as secret as the records.

    Args:
        step: between two of its steps.
        directory: of this run alone; the checkpoint before in it is replaced.
    """
    reducer = step.reducer
    with reducer.propagate_errors():
        step.check_nothing_pending()
        reducer.free_whole_weights()
        folder = as_path("directory", directory)
        rest, tensors = _split(step)
        own = _WEIGHTS + secrets.token_hex(8)
        name = reducer.broadcast("the name of the checkpoint", lambda: own)
        folder.mkdir(parents=True, exist_ok=True)
        _move(write_tensors, tensors, folder / name, reducer)

        def finish() -> None:
            checkpoint.save(folder / _STATE, {**rest, "weights": name})
            for old in folder.glob(f"{_WEIGHTS}*"):
                if old.name != name:
                    shutil.rmtree(old)

        reducer.broadcast("the end of the checkpoint", finish)


def load(step: "PrivateStep", directory: str | os.PathLike[str]) -> None:
    """Go on from a checkpoint that `save` wrote; every rank calls it.

    Weights and optimizer are, bit for bit, those that were saved, whatever the number of ranks. So are
    the draws of slots. Steps that were charged since are repeated under the same noise by the same
    number of ranks, and drawn anew and charged again by another (`PrivacyWarning`).

    Args:
        step: of the same plan, data and optimizer, before its first draw.
        directory: as passed to `save`. Its metadata is a pickle of torch's: read your own alone.
    """
    reducer = step.reducer
    with reducer.propagate_errors():
        step.check_nothing_pending()
        reducer.free_whole_weights()
        folder = as_path("directory", directory)

        def read() -> dict[str, Any]:
            return checkpoint.load(folder / _STATE)

        rest = reducer.broadcast("the checkpoint", read)
        path = folder / str(rest.pop("weights"))
        tensors = _empty(step, path)
        _move(read_tensors, tensors, path, reducer)
        load_state(step, _joined(rest, tensors))
        step.adopt_weights()


def _move(
    write_or_read: Callable[..., Any],
    tensors: dict[str, Tensor],
    path: Path,
    reducer: Local,
) -> None:
    """Write tensors to a folder, or read them from it, each rank its own shards."""
    try:
        with warnings.catch_warnings():
            # of a process alone, which is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            if not reducer.processes:
                write_or_read(tensors, checkpoint_id=path, no_dist=True)
            else:
                # a rank that cannot reach the folder raises here, before torch's collectives
                reducer.exchange("the checkpoint's shards")
                with reducer.processes.guarded("the checkpoint"):
                    write_or_read(tensors, checkpoint_id=path, process_group=reducer.processes.group)
    except CheckpointException as error:  # no Exception, and raised on all ranks
        raise CheckpointError(
            f"the weights of the checkpoint at {path} cannot be written or read "
            f"({shorten(str(error), 300)}): a run must go on from exactly the state its ledger was "
            "charged for. Make room for them, or restore the folder, and call it again."
        ) from error


def _split(step: "PrivateStep") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A step's state as plain data, and its large tensors by names that do not depend on ranks."""
    state = state_of(step)
    tensors = {f"model/{name}": value for name, value in state.pop("model").items()}
    optimizer = state.pop("optimizer")
    names = _optimized(step)
    for index, entries in optimizer["state"].items():
        for key, value in list(entries.items()):
            if isinstance(value, Tensor):
                tensors[f"optimizer/{names[index]}/{key}"] = value
    plain = {
        names[index]: {key: value for key, value in entries.items() if not isinstance(value, Tensor)}
        for index, entries in optimizer["state"].items()
    }
    optimizer = {"names": names, "plain": plain, "param_groups": optimizer["param_groups"]}
    return {**state, "optimizer": optimizer}, tensors


def _joined(rest: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What `_split` took apart."""
    saved = rest["optimizer"]
    entries: dict[str, dict[str, Any]] = {name: dict(plain) for name, plain in saved["plain"].items()}
    for place, value in tensors.items():
        kind, name = place.split("/", 1)
        if kind == "optimizer":
            name, key = name.rsplit("/", 1)
            entries[name][key] = value
    numbers = {name: index for index, name in enumerate(saved["names"])}
    optimizer = {
        "state": {numbers[name]: each for name, each in entries.items()},
        "param_groups": saved["param_groups"],
    }
    model = {
        place.removeprefix("model/"): value
        for place, value in tensors.items()
        if place.startswith("model/")
    }
    return {**rest, "model": model, "optimizer": optimizer}


def _empty(step: "PrivateStep", path: Path) -> dict[str, Tensor]:
    """Tensors to read a checkpoint into, sharded as the step's own parameters are."""
    try:
        written = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # whatever unpickling half a file raises
        raise CheckpointError(
            f"the weights of the checkpoint at {path} cannot be read: {error}. A run must go on from "
            "exactly the state its ledger was charged for. Restore the folder, or start a new run."
        ) from error
    model = step.model.state_dict()
    shapes = dict(step.model.named_parameters())
    empty: dict[str, Tensor] = {}
    for place, stored in written.items():
        kind, name = place.split("/", 1)
        like = model.get(name) if kind == "model" else shapes.get(name.rsplit("/", 1)[0])
        if not isinstance(stored, TensorStorageMetadata) or like is None:
            raise CheckpointError(
                f"the checkpoint at {path} has {place}, which the model has not: it is of another one. "
                "Resume with the model it was written for."
            )
        size, dtype = stored.size, stored.properties.dtype
        if like.shape == size:
            empty[place] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
        elif kind == "optimizer":  # such as a count of steps, which is not sharded
            empty[place] = torch.zeros(size, dtype=dtype)
        else:
            raise CheckpointError(
                f"the checkpoint at {path} has {place} of shape {tuple(size)}, and the model's is "
                f"{tuple(like.shape)}: it is of another one. Resume with the model it was written for."
            )
    return empty


def _optimized(step: "PrivateStep") -> list[str]:
    """Names of the optimizer's parameters, in the order of its state."""
    names = {id(value): name for name, value in step.model.named_parameters()}
    optimized = [value for group in step.optimizer.param_groups for value in group["params"]]
    # a frozen parameter of another model may be among them, which has no state
    return [names.get(id(value), f"no. {number}") for number, value in enumerate(optimized)]
