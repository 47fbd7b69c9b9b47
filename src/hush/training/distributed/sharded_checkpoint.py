"""Checkpoints of a step with sharded parameters, by `torch.distributed.checkpoint`.

Every rank writes its shards of the weights and of the optimizer's state. Rank 0 writes the rest of the
step's state to a small file that names them and is replaced at the end, so a crash leaves the previous
checkpoint. Another number of ranks, ranks with the whole model, or one process may read it.
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
from hush.training import checkpoint
from hush.training.checkpoint import load_state, state_of
from hush.training.reducer import Local

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

_STATE, _WEIGHTS = "step.safetensors", "weights-"


def save(step: "PrivateStep", directory: str | os.PathLike[str]) -> None:
    """Write a step's checkpoint into a folder that all ranks can reach; every rank calls it.

    It is as secret as the records.

    Args:
        step: Step between two of its batches.
        directory: Folder of this run alone; its previous checkpoint is replaced.
    """
    reducer = step.reducer
    with reducer.propagate_errors():
        step.check_nothing_pending()
        reducer.free_whole_weights()
        folder = Path(directory)
        state = state_of(step)
        tensors = {f"model/{name}": value for name, value in state.pop("model").items()}
        entries = state["optimizer"]["state"]
        for number, entry in entries.items():
            large = {key: value for key, value in entry.items() if isinstance(value, Tensor)}
            tensors |= {f"optimizer/{number}/{key}": value for key, value in large.items()}
            entries[number] = {key: value for key, value in entry.items() if key not in large}
        name = reducer.broadcast("the checkpoint's name", lambda: _WEIGHTS + secrets.token_hex(8))
        folder.mkdir(parents=True, exist_ok=True)
        _move(write_tensors, tensors, folder / name, reducer)

        def finish() -> None:
            checkpoint.save(folder / _STATE, {**state, "weights": name})
            for old in folder.glob(f"{_WEIGHTS}*"):
                if old.name != name:
                    shutil.rmtree(old)

        reducer.broadcast("the end of the checkpoint", finish)


def load(step: "PrivateStep", directory: str | os.PathLike[str]) -> None:
    """Continue from a checkpoint that `save` wrote; every rank calls it.

    Weights, optimizer state and draws of slots are restored bit for bit, for any number of ranks. Steps
    that were charged since are repeated under the same noise by the same number of ranks. Another number
    draws them anew and charges them again (`PrivacyWarning`).

    Args:
        step: Step of the same plan, data and optimizer, before its first draw.
        directory: Folder passed to `save`. Its metadata is a pickle of torch's: read only your own.
    """
    reducer = step.reducer
    with reducer.propagate_errors():
        step.check_nothing_pending()
        reducer.free_whole_weights()
        folder = Path(directory)
        state = reducer.broadcast("the checkpoint", lambda: checkpoint.load(folder / _STATE))
        path = folder / str(state.pop("weights"))
        tensors = _empty(step, path)
        _move(read_tensors, tensors, path, reducer)
        state["model"] = {}
        for place, value in tensors.items():
            kind, name = place.split("/", 1)
            if kind == "model":
                state["model"][name] = value
            else:
                number, key = name.split("/", 1)
                state["optimizer"]["state"][int(number)][key] = value
        load_state(step, state)
        step.adopt_weights()


def _move(
    write_or_read: Callable[..., Any], tensors: dict[str, Tensor], path: Path, reducer: Local
) -> None:
    """Write tensors to a folder, or read them from it, each rank its own shards."""
    try:
        with warnings.catch_warnings():
            # meant for one process
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            if not reducer.processes:
                write_or_read(tensors, checkpoint_id=path, no_dist=True)
                return
            # a rank that cannot reach the folder raises here, before torch's collectives
            reducer.exchange("the checkpoint's shards")
            with reducer.processes.guarded("the checkpoint"):
                write_or_read(tensors, checkpoint_id=path, process_group=reducer.processes.group)
    except CheckpointException as error:  # no Exception, and raised on all ranks
        raise CheckpointError(
            f"the weights of the checkpoint at {path} cannot be written or read "
            f"({shorten(str(error), 300)}). Make room for them, or restore the folder, and try again."
        ) from error


def _empty(step: "PrivateStep", path: Path) -> dict[str, Tensor]:
    """Tensors to read a checkpoint into, sharded like the step's own parameters."""
    try:
        written = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # unpickling half a file raises any of them
        raise CheckpointError(
            f"the weights of the checkpoint at {path} cannot be read: {error}. Restore the folder, or "
            "start a new run."
        ) from error
    like: dict[str, Tensor] = {f"model/{key}": value for key, value in step.model.state_dict().items()}
    optimized = (value for group in step.optimizer.param_groups for value in group["params"])
    like |= {f"optimizer/{number}": value for number, value in enumerate(optimized)}
    empty: dict[str, Tensor] = {}
    for place, stored in written.items():
        assert isinstance(stored, TensorStorageMetadata)
        size, dtype = stored.size, stored.properties.dtype
        ours = like.get(place if place.startswith("model/") else place.rsplit("/", 1)[0])
        if ours is not None and ours.shape == size:
            empty[place] = torch.zeros_like(ours, dtype=dtype, requires_grad=False)
        elif ours is not None and place.startswith("optimizer/"):
            empty[place] = torch.zeros(size, dtype=dtype)  # such as a count of steps
        else:
            here = "is not here" if ours is None else f"has shape {tuple(ours.shape)} here"
            raise CheckpointError(
                f"the checkpoint at {path} has {place} of shape {size}, which {here}. Resume with the "
                "model that the checkpoint was written for."
            )
    return empty
