"""Metrics of one step for callbacks: public or charged ones, and sensitive ones by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hush.clipping.norms import L2
from hush.core.errors import InvalidValue, Unsupported
from hush.gradients.probe import buffers_restored
from hush.gradients.tree import call_model, tree_leaves, tree_map
from hush.training.clipped_gradients import occupied_tape
from hush.training.data import Batch
from hush.training.evaluate import evaluation_mode
from hush.training.step import PrivateStep


class StepMetrics(Mapping[str, float]):
    """Metrics of the step that was just charged, to be read before the next one.

    The entries of the mapping may be published: `epsilon` and `delta` of all charges on the ledger,
    `learning_rate` of the step (`learning_rate/1` and so on of further parameter groups), and
    `evaluation/...`. `sensitive(name)` computes a non-private metric of the batch; never publish it.

    Args:
        step: Step after it ran.
        batch: Batch that it ran on.
        delta: Delta of epsilon; None: the one stored on the ledger.
    """

    def __init__(self, step: PrivateStep, batch: Batch, *, delta: float | None = None) -> None:
        self._step, self._batch, self._number, self._delta = step, batch, step.steps, delta
        self._released: dict[str, Any] = {"epsilon": None, "delta": None}  # composed on request
        for number, group in enumerate(step.optimizer.param_groups):
            self._released["learning_rate" + f"/{number}" * (number > 0)] = float(group["lr"])

    def add(self, released: Mapping[str, float]) -> None:
        """Add numbers that are public or charged, by name."""
        self._released.update(released)

    def __getitem__(self, name: str) -> float:
        if name in _SENSITIVE and name not in self._released:
            raise KeyError(
                f"{name!r} depends on the records. Call metrics.sensitive({name!r}), and keep the "
                "result as secret as they are."
            )
        if name not in self._released:
            raise KeyError(f"step {self._number} has no metric {name!r}; it has {', '.join(self)}.")
        if self._released[name] is None:
            self._check_newest(name)
            spent = self._step.spent(self._delta)
            self._released |= {"epsilon": spent.epsilon.upper, "delta": spent.delta}
        value: float = self._released[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._released)

    def __len__(self) -> int:
        return len(self._released)

    def sensitive(self, name: str) -> float:
        """Non-private metric of the training batch; never publish it.

        Args:
            name: `batch_size`: units drawn. `skipped`: records skipped in all steps because their
                gradient was not finite. `loss`: mean over the batch, in evaluation mode.
                `clipped_share`: share of the slots (or units) drawn with a gradient that exceeds the
                clipping norm. The last two are computed on request, at the weights after the step.
        """
        check_sensitive([name])
        self._check_newest(name)
        if name in ("loss", "clipped_share") and self._step.reducer.processes:
            raise Unsupported(
                f"{name} is of the whole batch, and rank 0 has a part of it. Request batch_size and "
                "skipped alone."
            )
        with buffers_restored(self._step.model, self._step.gradients.probed.changing_buffers):
            return _SENSITIVE[name](self._step, self._batch)

    def _check_newest(self, name: str) -> None:
        if self._step.steps != self._number:
            raise InvalidValue(
                f"{name!r} of step {self._number} was read after step {self._step.steps}. Read metrics "
                "in the callback that receives them."
            )


OnStep = Callable[[int, StepMetrics], object]
"""Callback `on_step(step, metrics)`, called after each step."""


def check_sensitive(names: Sequence[str]) -> tuple[str, ...]:
    """Names of sensitive metrics; raises for others."""
    if isinstance(names, str) or not set(names) <= {*_SENSITIVE}:
        raise InvalidValue(
            f"sensitive={names!r} must be a list of names among {', '.join(_SENSITIVE)}.",
            key="sensitive",
        )
    return tuple(names)


@torch.no_grad()
def _batch_loss(step: PrivateStep, batch: Batch) -> float:
    total, records = 0.0, 0
    with evaluation_mode(step.model):
        for part in batch.physical_batches():
            inputs, targets, present, _ = tree_map(part, step.gradients.to_device)
            losses = step.gradients.loss(call_model(step.model, inputs), targets)
            # a mean counts once per record
            losses = losses.expand(len(next(tree_leaves(targets)))) if losses.dim() == 0 else losses
            losses = losses if present is None else losses[present]
            total, records = total + float(losses.double().sum()), records + len(losses)
    return total / max(1, records)


def _clipped_share(step: PrivateStep, batch: Batch) -> float:
    clipping, clipped = step.plan.clipping, 0
    if type(clipping) is not L2:
        raise Unsupported(
            f"clipped_share is for l2 clipping, and the plan clips by {clipping}. Log another metric."
        )
    with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
        for part in batch.physical_batches():
            inputs, targets, present, counts = tree_map(part, step.gradients.to_device)
            tape = step.gradients.record(inputs, targets)
            norms = occupied_tape(tape, step.gradients.reduction, present, counts).norms(2.0)
            clipped += int((norms > clipping.norm).sum())
    return clipped / max(1, len(batch))


_SENSITIVE: dict[str, Callable[[PrivateStep, Batch], float]] = {
    "batch_size": lambda _, batch: len(batch),
    "skipped": lambda step, _: step.skipped,
    "loss": _batch_loss,
    "clipped_share": _clipped_share,
}
