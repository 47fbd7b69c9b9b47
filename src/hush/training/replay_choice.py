"""Choice between computing physical batches and replaying them, from synthetic records and time."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hush.core.errors import Unsupported
from hush.gradients.cuda_graph import Replay
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.data import Data, count, held_slots, take
from hush.training.synthetic import synthetic_records

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

_HOST_BOUND = 0.1
"""Share of a batch's time that a batch of two records takes, below which the GPU hardly waits."""
_GAIN = 0.98  # share of the time without a graph that a replay may take to be worth its memory
_FEWEST_STEPS = 32  # steps that pay for the measurement and the capture, which take about as long as ten
_MEMORY_SHARE = 0.5  # share of the free memory of a GPU that a graph may keep


def check_replay(step: "PrivateStep") -> None:
    """Raise if `replay` is True and the plan, units or device rule it out."""
    if step.gradients.execution.replay and (reason := why_not(step)) is not None:
        raise Unsupported(f"replay=True records the work of a physical batch, and {reason}")


def why_not(step: "PrivateStep") -> str | None:
    """Reason why a step's physical batches cannot be replayed, for any model; None: they can."""
    source, device = step.generator, step.device.type
    if step.plan.sampling.coordinate_participation < 1:
        if not isinstance(source, torch.Generator) or source.device.type != device:
            return (
                "the coordinates that take part would be the same in each replay. Leave out replay, or "
                'pass arithmetic="assumed" without a generator of your own.'
            )
        if step.reducer.processes:
            return (
                "each rank draws the coordinates that take part from its own stream. Leave out replay, "
                "or run the step in one process."
            )
    if step.reducer.modules.sharded:
        return "sharded weights are gathered anew in every pass. Leave out replay."
    if step.units is not None:
        return "units have different numbers of records. Leave out replay."
    if device != "cuda":
        return "the model is not on a GPU. Move it there, or leave out replay."
    if len(step.plan.clipping.sensitivity(step.dimension)) > 1:
        return "clipping in several blocks is not replayed. Leave out replay."
    return None


def choose_replay(step: "PrivateStep", data: Data, physical: int, steps: int | None) -> Replay | None:
    """Replay of the step's physical batches, for so many steps or many; None: computed without.

    The step stores the decision for later calls and checkpoints.
    """
    gradients = step.gradients
    required, changing = gradients.execution.replay, gradients.probed.changing_buffers
    if required and changing:
        raise Unsupported(
            f"replay=True is for work on the GPU alone, and forward passes change "
            f"{', '.join(sorted(changing)[:3])}, which Python restores. Leave out replay."
        )
    if required is False or changing or gradients.probed.one_by_one or why_not(step) is not None:
        gradients.replayed = False
        return None
    parts = step.model, gradients.loss, step.plan.clipping, gradients.views
    replay = Replay(*parts, most_records=physical, required=bool(required))
    if required:
        gradients.replayed = True
    elif gradients.replayed is None and (steps is None or steps >= _FEWEST_STEPS):
        # a graph has the kernels of forward() alone, not the work of hooks in Python
        hooked = any(each._forward_hooks or each._forward_pre_hooks for each in step.model.modules())
        gradients.replayed = not hooked and (not held_slots(data) or _pays(step, replay, data, physical))
    if gradients.replayed is not None:
        # one decision for all ranks goes into the checkpoint: a repeated step must round alike
        gradients.replayed = all(step.reducer.exchange("the choice of replays", gradients.replayed))
    return replay if gradients.replayed else None


def _pays(step: "PrivateStep", replay: Replay, data: Data, physical: int) -> bool:
    """Whether replaying is faster and keeps little memory, measured on synthetic records."""
    size = max(2, min(physical, int(step.plan.sampling.expected(step.records))))
    records = tree_map(take(data, torch.arange(min(2, count(data)))), step.gradients.to_device)
    generator = step.generator if isinstance(step.generator, torch.Generator) else None
    state = None if generator is None else generator.get_state()
    mask = step.coordinate_mask()
    cuda = step.device.type == "cuda"
    batch: tuple[Any, Any]

    def clip(pair: tuple[Any, Any]) -> None:
        present = torch.ones(len(next(tree_leaves(pair))), dtype=torch.bool, device=step.device)
        replay.clip_padded(*pair, present, mask)

    def clip_again() -> None:
        replay(*batch, mask, generator if mask else None, verify=not replay.captured)
        replay.failed()

    with torch.random.fork_rng([step.device] if cuda else []):
        try:
            pair = synthetic_records(*records)
            try:
                clip(pair)
            except Exception:  # any error of the model for an input that it does not accept
                pair = records
            batch = tree_map(pair, lambda rows: rows[torch.arange(size, device=rows.device) % len(rows)])
            two = tree_map(batch, lambda rows: rows[:2])
            few, every = seconds(lambda: clip(two)), seconds(lambda: clip(batch))
            if few <= _HOST_BOUND * every:  # the GPU does not wait for Python
                return False
            free, _ = torch.cuda.mem_get_info(step.device)
            replayed = seconds(clip_again)
            kept = free - torch.cuda.mem_get_info(step.device)[0]
            return replay.captured and replayed < _GAIN * every and kept < _MEMORY_SHARE * free
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            if generator is not None and state is not None:
                generator.set_state(state)
            if cuda:  # the graphs' own memory would come on top of the measurement's
                torch.cuda.empty_cache()


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
