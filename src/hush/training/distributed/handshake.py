"""Values of the step, the data and the draw that must be equal on all ranks."""

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hush.core.plan import plan_text
from hush.gradients.losses import criterion_of
from hush.training.checkpoint import run_facts, settings_digest
from hush.training.data import (
    Batch,
    Data,
    count,
    data_digest,
    describe_record,
    pair_of,
)
from hush.training.distributed.processes import Facts, Processes
from hush.training.fingerprint import fingerprint

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


def step_facts(step: "PrivateStep", generator: torch.Generator | None) -> Facts:
    """Values of a new step that the ranks compare before the first draw."""
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
        "units": str(step.units and step.units.digest).encode(),  # user ids may be private
        "neighbours": str(step.adjacency),
        "model": f"{type(step.model).__name__} of {'; '.join(parameters)}",
        "the model's weights": weights_digest(step.model),
        "loss": _describe_loss(criterion_of(step.gradients.loss)),
        "the seed": str(generator and generator.initial_seed()).encode(),
        "public records": None if public is None else fingerprint(part.cpu() for part in public),
        "kind of device": step.device.type,
    }


def draw_facts(step: "PrivateStep", batch: Batch, *, adopted: bool) -> Facts:
    """Values of a draw and of the step that the ranks compare before the sum.

    `adopted` means that weights were set outside of the step since the last comparison.
    """
    source, kind = step.generator, step.device.type
    return {
        "the number of steps": step.steps,
        "the slots drawn": fingerprint([batch.indices]).encode(),
        "the stream of draws": fingerprint([source.get_state()]).encode(),
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
    """Hash of the tensors among the values, except shards, which differ between ranks."""
    tensors = (value for value in values if isinstance(value, Tensor))
    return fingerprint(value.cpu() for value in tensors if not hasattr(value, "placements"))


def _describe_loss(loss: Any) -> str:
    """Name of a loss, with the settings and a hash of the tensors (e.g. class weights) of a module."""
    if not isinstance(loss, nn.Module):
        return str(getattr(loss, "__qualname__", type(loss).__qualname__))
    plain, state = (bool, int, float, str), loss.state_dict()
    settings = {name: value for name, value in vars(loss).items() if isinstance(value, plain)}
    hashed = tensors_digest(state.values())
    return f"{type(loss).__qualname__} {settings} with {', '.join(state)} of hash {hashed}"


def compared_slots(data: Data, processes: Processes) -> int:
    """Number of slots of the data, after verifying that all ranks have the same records."""
    slots = count(data)
    facts = {
        "the number of records": str(slots).encode(),  # private under ADD_REMOVE
        "the kind of record": describe_record(data),
        "which record is in which slot": str(data_digest(data, slots)).encode(),
    }
    processes.agree("comparing the data", facts)
    return slots
