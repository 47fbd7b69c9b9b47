"""Handshake of the ranks before any work: whoever would run another step is named, on every rank."""

import hashlib
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hush.core.errors import DataError, ProcessFailed, Unsupported
from hush.core.plan import plan_text
from hush.core.randomness import SystemSource, cryptographic
from hush.gradients.models import ModuleTree
from hush.training.checkpoint import settings_digest
from hush.training.data import Batch, pair_of
from hush.training.distributed.processes import Processes
from hush.training.fingerprint import fingerprint

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


_UNITS, _SEED = "units (their owners, per_unit, gradient)", "the seed"
_SECRET = {_UNITS, _SEED}
"""Facts of which a hash may tell too much: few seeds are possible, and owners may be private."""


def check_same_step(
    step: "PrivateStep", processes: Processes, generator: torch.Generator | None
) -> None:
    """Raise on every rank unless all are about to run the same step, from the same weights.

    Args:
        step: as it was made on this rank.
        processes: the ranks.
        generator: as passed to it.
    """
    _compare(processes.gather("the handshake", _facts(step, generator)))


def check_same(exchange: Callable[[str, Any], list[Any]], phase: str, facts: dict[str, Any]) -> None:
    """Raise on every rank unless short plain facts, by name, are equal on all of them.

    Args:
        exchange: `Local.exchange` of the reducer.
        phase: Name of the place in the program.
        facts: Facts of this rank.
    """
    _compare(exchange(phase, facts))


def _compare(described: list[dict[str, Any]]) -> None:
    """Raise if a rank's facts, by name, are not those of rank 0."""
    for name, first in described[0].items():
        for rank, other in enumerate(described):
            if other.get(name) != first:
                both = f"rank 0 has {first}, rank {rank} has {other.get(name)}"
                raise Unsupported(
                    f"ranks 0 and {rank} differ in {name}: "
                    f"{'it is secret, and not shown' if name in _SECRET else both}. The ranks run one "
                    "step together, charged once, as one plan on one model: nothing was drawn or "
                    "charged. Pass every rank the same, load or set weights on all of them, or pass "
                    "processes=False for runs that are independent of each other."
                )


def check_same_weights(model: nn.Module, optimizer: torch.optim.Optimizer, processes: Processes) -> None:
    """Raise on every rank unless all have the same weights and buffers, and state of the optimizer."""
    entries = optimizer.state_dict()["state"].values()
    check_same(
        processes.exchange,
        "comparing the weights",
        {
            "weights": weights_digest(model),
            "states of the optimizer": _digest(v for entry in entries for v in entry.values()),
        },
    )


def check_same_draw(
    step: "PrivateStep", batch: Batch, processes: Processes, content: int, *, adopted: bool
) -> list[int]:
    """A number of each rank, after a check that all are in the same step and have the same draw.

    Args:
        step: Step of the batch.
        batch: Slots drawn.
        processes: Ranks that run the step.
        content: Number of this rank.
        adopted: Whether weights were set outside of the step since the ranks compared theirs.
    """
    source = step.generator
    state = None if isinstance(source, SystemSource) else fingerprint([source.get_state()])
    weights = weights_digest(step.model) if adopted else None
    applied = settings_digest(step.optimizer)
    modes = forward_modes(step.gradients.tree, step.device)
    drawn = [step.steps, fingerprint([batch.indices]), state, step.size, applied, weights, modes]
    said = processes.exchange(f"the sum of step {step.steps + 1}", [drawn, content])
    for rank, (other, _) in enumerate(said):
        if other != said[0][0]:
            raise ProcessFailed(
                f"ranks 0 and {rank} are not in the same step, did not draw the same slots for it, "
                "train other parameters or with other settings of the optimizer, run forward passes "
                "in other modes or adopted other weights: they would add up what does not belong "
                "together, or part. Nothing was charged. Do the same on every rank (freeze, "
                "schedule, train() and eval(), autocast, adopt_weights), or resume all from the "
                "last checkpoint."
            )
    return [number for _, number in said]


def check_state_advances(held: list[bool], *, changing: bool) -> None:
    """Raise on every rank if one could not move on what forward passes change, as the others do.

    Args:
        held: whether each rank has records, of whose shapes one is made up for that.
        changing: whether passes change buffers or attributes.
    """
    if changing and not all(held):
        raise DataError(
            f"rank {held.index(False)} has no records, and the model changes buffers or attributes in "
            "its forward passes: a pass over a made-up record moves them on in every step, and without "
            "a record's shapes the ranks would part. Give every rank some records, or keep no state."
        )


def weights_digest(model: nn.Module) -> str:
    """A hash of the weights and buffers, also of those that no checkpoint keeps."""
    state = {**model.state_dict(), **dict(model.named_buffers())}
    return _digest(state.values())


def _digest(values: Iterable[Any]) -> str:
    # a shard is on one rank alone: there is nothing to compare it with
    return fingerprint(
        value.cpu() for value in values if isinstance(value, Tensor) and not hasattr(value, "placements")
    )


def _facts(step: "PrivateStep", generator: torch.Generator | None) -> dict[str, Any]:
    """What must be the same on every rank, in words that a message can show."""
    from hush import __version__

    placed = {name: getattr(value, "placements", None) for name, value in step.model.named_parameters()}
    structure = [
        f"{name} {tuple(value.shape)} {str(value.dtype)[6:]}{' trained' * value.requires_grad}"
        f"{f' {placed[name]}' * (placed[name] is not None)}"
        for name, value in step.model.named_parameters()
    ]
    shapes = f"{', '.join(structure[:4])}, {len(structure)} parameters of hash "
    shapes += hashlib.sha256("\n".join(structure).encode()).hexdigest()[:8]
    seed = None if generator is None else str(generator.initial_seed()).encode()
    public = None if step.basis_schedule is None else pair_of(step.basis_schedule.public)
    return {
        "hush": __version__,
        "torch": torch.__version__,
        "plan": plan_text(step.plan).replace("\n", " ").strip(),
        "records": step.records,
        "neighbours": str(step.adjacency),
        _UNITS: None if step.units is None else step.units.digest,
        "shard": step.reducer.shard,
        "model": f"{type(step.model).__name__} of {shapes}",
        "the model's weights": weights_digest(step.model),
        "loss": _loss(getattr(step.gradients.loss, "loss", step.gradients.loss)),
        "optimizer": type(step.optimizer).__name__,
        "settings of the optimizer": step.optimizer_settings,
        "secure": isinstance(step.generator, SystemSource),
        "arithmetic": "proved" if cryptographic(step.generator) else "assumed",
        _SEED: None if seed is None else hashlib.sha256(seed).hexdigest(),
        "views": None if step.gradients.views is None else _name(step.gradients.views),
        "public records": None if public is None else fingerprint(part.cpu() for part in public),
        "kind of device": step.device.type,
    }


def _loss(loss: Any) -> str:
    """Name of a loss, and of a module its settings and a hash of its tensors, such as class weights."""
    if not isinstance(loss, nn.Module):
        return _name(loss)
    settings = {
        name: value
        for name, value in sorted(vars(loss).items())
        if isinstance(value, (bool, int, float, str)) and name != "training" and name[0] != "_"
    }
    state = loss.state_dict()
    tensors = f" with {', '.join(state)} of hash {fingerprint(v.cpu() for v in state.values())}"
    return f"{_name(loss)} {settings}{tensors * bool(state)}"


def _name(function: Any) -> str:
    """Name of a function, or of the class of a module."""
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def forward_modes(tree: ModuleTree, device: torch.device) -> list[Any]:
    """How forward passes run: which modules are in training mode (a checksum), and autocast."""
    training = bytes(module.training for module in tree.modules().values())
    autocast = torch.is_autocast_enabled(device.type)
    return [zlib.crc32(training), autocast and str(torch.get_autocast_dtype(device.type))]
