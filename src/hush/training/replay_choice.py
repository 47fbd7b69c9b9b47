"""Decide whether to use CUDA graphs, from measurements on synthetic records."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hush.core.errors import Unsupported
from hush.gradients.cuda_graph import Replay
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.data import Data, count, take
from hush.training.synthetic import synthetic_records

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

_HOST_BOUND = 0.1
"""Threshold on the time of two records relative to a batch; below it, the host is not the bottleneck."""
_GAIN = 0.98  # maximum relative time of a replay for which a graph is worth its memory
_FEWEST_STEPS = 32  # minimum number of steps; the measurement takes as long as about ten steps
_MEMORY_SHARE = 0.5  # maximum fraction of the free GPU memory that a graph may keep


def check_replay(step: "PrivateStep") -> None:
    """Raise if `replay` is True but the plan, units or device do not support it."""
    if step.gradients.execution.replay and (reason := why_not(step)) is not None:
        raise Unsupported(f"replay=True uses CUDA graphs, but {reason}")


def why_not(step: "PrivateStep") -> str | None:
    """Reason why a plan, units or device do not support CUDA graphs; None if they do."""
    if step.plan.sampling.coordinate_participation < 1:
        return "the sampled coordinates would be the same in each replay. Leave out replay."
    if step.gradients.clip_norm is not None:
        return "the clipping norm of Quantile changes in each step. Leave out replay."
    if step.reducer.modules.sharded:
        return "sharded weights are gathered in every pass. Leave out replay."
    if step.units is not None:
        return "users have different numbers of records. Leave out replay."
    if step.device.type != "cuda":
        return "the model is not on a GPU. Move it to a GPU, or leave out replay."
    if len(step.plan.clipping.sensitivity(step.dimension)) > 1:
        return "clipping in several blocks is not supported. Leave out replay."
    return None


def choose_replay(step: "PrivateStep", data: Data, physical: int, steps: int | None) -> Replay | None:
    """Replay of the step's physical batches, or None if CUDA graphs are not used.

    The step stores the decision for later calls and checkpoints.

    Args:
        step: Step to run.
        data: Data of the step.
        physical: Physical batch size.
        steps: Number of steps; None: no limit.
    """
    gradients = step.gradients
    required, changing = gradients.execution.replay, gradients.probed.changing_buffers
    if required and changing:
        raise Unsupported(
            f"replay=True does not support forward passes that change buffers "
            f"({', '.join(sorted(changing)[:3])}). Leave out replay."
        )
    if required is False or changing or gradients.probed.one_by_one or why_not(step) is not None:
        gradients.replayed = False
        return None
    parts = step.model, gradients.loss, step.plan.clipping, gradients.views
    replay = Replay(*parts, most_records=physical, required=bool(required))
    if required:
        gradients.replayed = True
    elif gradients.replayed is None and (steps is None or steps >= _FEWEST_STEPS):
        # a graph repeats the kernels of forward(), but not the Python code of hooks
        hooked = any(each._forward_hooks or each._forward_pre_hooks for each in step.model.modules())
        gradients.replayed = not hooked and _pays(step, replay, data, physical)
    if gradients.replayed is not None:
        # ranks and resumed runs must share the decision, so that repeated steps round identically
        gradients.replayed = all(step.reducer.exchange("the choice of replays", gradients.replayed))
    return replay if gradients.replayed else None


def _pays(step: "PrivateStep", replay: Replay, data: Data, physical: int) -> bool:
    """Whether replays are faster and use little memory, from measurements on synthetic records."""
    size = max(2, min(physical, int(step.plan.sampling.expected(step.records))))
    records = tree_map(take(data, torch.arange(min(2, count(data)))), step.gradients.to_device)
    cuda = step.device.type == "cuda"
    batch: tuple[Any, Any]

    def clip(pair: tuple[Any, Any]) -> None:
        present = torch.ones(len(next(tree_leaves(pair))), dtype=torch.bool, device=step.device)
        replay.clip_padded(*pair, present)

    def clip_again() -> None:
        replay(*batch, verify=not replay.captured)
        replay.failed()

    with torch.random.fork_rng([step.device] if cuda else []):
        try:
            pair = synthetic_records(*records)
            try:
                clip(pair)
            except Exception:  # the model may raise any error for invalid inputs
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
            if cuda:  # free the memory of the measurement before capturing
                torch.cuda.empty_cache()


def seconds(work: Callable[[], object]) -> float:
    """Run time of a function in seconds, including the GPU: minimum of three runs after a warm-up."""
    work()
    spans = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        spans.append(time.perf_counter() - start)
    return min(spans)
