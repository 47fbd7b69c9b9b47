"""Whether the physical batches of a step are replayed as CUDA graphs: where that is possible and faster.

Decided before the first draw on the records of the probe, made-up ones wherever the model takes them, so
that the layout of physical batches is a function of the model, of public shapes and of time.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hush.core.errors import InvalidValue, Unsupported, short_repr
from hush.gradients.cuda_graph import Replay
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.data import Data, count, held_slots, take
from hush.training.synthetic import synthetic_records

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

_HOST_BOUND = 0.1
"""Share of a batch's time that a batch of two records takes, below which the GPU hardly waits."""
_GAIN = 0.98
"""Share of the time without a graph that a replay may take to be worth its memory."""
_FEWEST_STEPS = 32
"""Steps that pay for the measurement and the capture, which take about as long as ten."""
_MEMORY_SHARE = 0.5
"""Share of the free memory of a GPU that a graph may keep."""


def check_replay(step: "PrivateStep") -> None:
    """Raise if `replay` is no choice, or is True and the plan, units or device rule it out."""
    replay = step.gradients.execution.replay
    if replay is not None and not isinstance(replay, bool):
        raise InvalidValue(
            f"replay={short_repr(replay)} must be True, False or None: whether physical batches "
            "are replayed as CUDA graphs. Leave it out, and they are where that is possible and faster.",
            key="replay",
        )
    reason = why_not(step) if replay else None
    if reason is not None:
        raise Unsupported(reason)


def why_not(step: "PrivateStep") -> str | None:
    """Reason why a step's physical batches cannot be replayed, whatever its model; None: they can."""
    sampling = step.plan.sampling
    on_device = (
        isinstance(step.generator, torch.Generator) and step.generator.device.type == step.device.type
    )
    if sampling.coordinate_participation < 1 and not on_device:
        return (
            f"replay=True repeats the same work, and {type(sampling).__name__} draws which "
            "coordinates take part: replayed, the same ones always would, as only torch's generator "
            "on the GPU can be asked for new ones from within. Leave out replay, or pass "
            'arithmetic="assumed" without a generator of your own.'
        )
    if sampling.coordinate_participation < 1 and step.reducer.processes:
        return (
            f"replay=True repeats the same work, and {type(sampling).__name__} draws which coordinates "
            "take part from a stream of each rank and step, which a graph does not hold. Leave out "
            "replay, or run the step in one process."
        )
    if step.reducer.modules is not None:
        return (
            "replay=True repeats work on weights that stay where they are, and sharded ones are "
            "gathered anew in every pass. Leave out replay."
        )
    if step.units is not None:
        return (
            "replay=True repeats work of one shape, and units have different numbers of records. "
            "Leave out replay."
        )
    if step.device.type != "cuda":
        return (
            "replay=True records CUDA graphs and the model is not on a GPU. Move the model there, "
            "or leave replay out."
        )
    if len(step.plan.clipping.sensitivity(step.dimension)) > 1:
        return (
            "replay=True is for clipping in one block, and blocks of a gradient are not replayed. "
            "Leave replay out."
        )
    return None


def choose_replay(step: "PrivateStep", data: Data, physical: int, steps: int | None) -> Replay | None:
    """Replay of the step's physical batches; None: they are computed without.

    Args:
        step: after its probe. It remembers what was decided, which later calls and checkpoints go by.
        data: only shapes and types count, unless the model does not take made-up records.
        physical: records of a physical batch.
        steps: how many are to come; None: many.
    """
    gradients = step.gradients
    required, changing = gradients.execution.replay, gradients.probed.changing_buffers
    if required and changing:
        names = ", ".join(sorted(changing)[:3])
        raise Unsupported(
            f"replay=True is for work on the GPU alone, and forward passes change {names}: "
            "Python puts that back, so that each begins from the same state. Leave out replay."
        )
    if required is False or changing or gradients.probed.one_by_one or why_not(step) is not None:
        gradients.replayed = False
        return None
    replay = Replay(
        step.model,
        gradients.loss,
        step.plan.clipping,
        gradients.views,
        most_records=physical,
        required=required is True,
    )
    if required:
        gradients.replayed = True
    elif gradients.replayed is None and (steps is None or steps >= _FEWEST_STEPS):
        # what Python does in forward() beside launching kernels is not in a graph
        hooked = _hooked(step)
        gradients.replayed = not hooked and (not held_slots(data) or _pays(step, replay, data, physical))
    if gradients.replayed is not None:
        # one decision for all ranks goes into the checkpoint: a repeated step must round alike
        said = step.reducer.exchange("the choice of replays", gradients.replayed)
        gradients.replayed = all(said)
    return replay if gradients.replayed else None


def _hooked(step: "PrivateStep") -> bool:
    """Whether modules have hooks of their forward pass."""
    modules = step.model.modules()
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def _pays(step: "PrivateStep", replay: Replay, data: Data, physical: int) -> bool:
    """Whether replaying is faster, measured on records of the probe."""
    size = max(2, min(physical, int(step.plan.sampling.expected(step.records))))
    records = tree_map(take(data, torch.arange(min(2, count(data)))), step.gradients.to_device)
    generator = step.generator if isinstance(step.generator, torch.Generator) else None
    state = None if generator is None else generator.get_state()
    devices = [step.device] if step.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            pair = synthetic_records(*records)
            try:
                replay.clip_padded(*pair, _all(pair, step.device), None)
            except Exception:  # whatever the model raises for an input that it does not take
                pair = records
            return _faster(step, replay, tree_map(pair, partial(_repeat, size=size)))
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            if generator is not None and state is not None:
                generator.set_state(state)
            if step.device.type == "cuda":
                # what the measurement took: the graphs' own memory would come on top of it
                torch.cuda.empty_cache()


def _faster(step: "PrivateStep", replay: Replay, pair: tuple[Any, Any]) -> bool:
    """Whether a replay of these records takes clearly less time than they do, and not much memory."""
    mask = step.coordinate_mask()
    generator = step.generator if mask and isinstance(step.generator, torch.Generator) else None

    def clip(pair: tuple[Any, Any]) -> None:
        replay.clip_padded(*pair, _all(pair, step.device), mask)

    def clip_again() -> None:
        captured = replay.captured
        replay(*pair, mask, generator, verify=not captured)
        replay.failed()

    two = tree_map(pair, lambda rows: rows[:2])
    few, every = seconds(lambda: clip(two)), seconds(lambda: clip(pair))
    if not host_bound(few, every):
        return False
    free, _ = torch.cuda.mem_get_info(step.device)
    replayed = seconds(clip_again)
    kept = free - torch.cuda.mem_get_info(step.device)[0]
    return replay.captured and worth(replayed / every, kept / free)


def worth(time_share: float, memory_share: float) -> bool:
    """Whether a graph is worth its memory.

    Args:
        time_share: time of a replay over that of the same work without a graph.
        memory_share: what it keeps of the memory that was free.
    """
    return time_share < _GAIN and memory_share < _MEMORY_SHARE


def host_bound(few: float, every: float) -> bool:
    """Whether two records take a good part of a batch's time: then the GPU waits for Python.

    Args:
        few: seconds of a batch of two records.
        every: seconds of a whole one.
    """
    return few > _HOST_BOUND * every


def seconds(work: Callable[[], object]) -> float:
    """Time that work takes until the GPU is done, the least of three after the first time."""
    work()
    spans = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        spans.append(time.perf_counter() - start)
    return min(spans)


def _all(pair: tuple[Any, Any], device: torch.device) -> Tensor:
    """That every slot holds a record."""
    return torch.ones(len(next(tree_leaves(pair))), dtype=torch.bool, device=device)


def _repeat(rows: Tensor, size: int) -> Tensor:
    """The rows in turns, up to a number of them."""
    return rows[torch.arange(size, device=rows.device) % len(rows)]
