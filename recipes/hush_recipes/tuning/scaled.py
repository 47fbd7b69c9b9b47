"""Private optimizers beyond SGD and Adam: scale-then-privatize, and Adam with bias correction.

Scale-then-privatize (Ganesh, McMahan and Thakurta, 2025) multiplies each per-sample gradient by a public
scale per coordinate, clips it, and divides the noisy mean by the scale. DP-AdamBC (Tang, Shpilevskiy and
Lecuyer, 2024) subtracts the variance of the noise from Adam's second moments.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hush.clipping import L2
from hush.core.errors import Unsupported
from hush.core.parts import ClippedSum
from hush.gradients.entrywise_clipping import flat_rows
from hush.gradients.precision import full_precision, vector_norms
from hush.gradients.public_basis import PublicBasis
from hush.gradients.tape import GradientTape, MaskedTape, UnitTape
from hush.gradients.terms import zero_rows
from hush.training.clipped_gradients import occupied_tape
from hush.training.step import PrivateStep


@dataclass(frozen=True, eq=False)
class ScaledTape:
    """Per-sample gradients of a batch, multiplied by a scale per coordinate."""

    tape: GradientTape | MaskedTape | UnitTape
    scale: Tensor

    @property
    def present(self) -> Tensor | None:
        return self.tape.present

    def norms(self, order: float) -> Tensor:
        """l_order norms of the scaled gradients."""
        return torch.cat([vector_norms(rows, order) for _, rows in self._rows()])

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Weighted sum of the scaled gradients, as one flat vector; weight 0 adds exactly zero."""
        total = torch.zeros(len(self.scale), dtype=torch.float64, device=self.scale.device)
        for places, rows in self._rows():
            own = weights[places]
            rows = zero_rows(rows, own != 0).mul_(own.to(rows.dtype)[:, None])
            total += rows.sum(0, dtype=torch.float64)
        return {"scaled": total}

    def clip_entrywise(self, *_: Any) -> ClippedSum:
        raise Unsupported("scaled gradients are clipped as a whole. Pass clipping=hush.L2(norm).")

    def _rows(self) -> Iterator[tuple[Tensor | slice, Tensor]]:
        with full_precision(self.scale.device):
            for places, gradients in self.tape.chunks():
                rows = flat_rows(gradients)
                yield places, rows.mul_(self.scale.to(rows.dtype))


class ScaledStep(PrivateStep):
    """Private step that scales per-sample gradients before clipping, for Adam.

    The scale of a coordinate is 1 / (r + floor * R), normalized to a mean square of 1. Here r is the
    root of the coordinate's second moment over earlier releases, and R the root mean square of r. The
    scale is public, and the scaled gradient of a record is clipped.

    **Guarantee.** A step is charged like a `PrivateStep` of the same plan:
    docs/guarantees/poisson-gaussian.md. It runs in one process, without checkpoints.

    Args:
        args: Positional arguments of `PrivateStep`; the clipping is `L2`.
        floor: Smallest denominator, in units of R. A small one lets noise determine the scale.
        decay: Decay of the second moments, as in Adam.
        options: Keyword arguments of `PrivateStep`.
    """

    def __init__(self, *args: Any, floor: float = 1.0, decay: float = 0.999, **options: Any) -> None:
        super().__init__(*args, **options)
        if type(self.plan.clipping) is not L2 or self.reducer.processes:
            raise Unsupported("ScaledStep runs in one process with clipping=hush.L2(norm).")
        self.floor, self.decay = floor, decay
        self.moments = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        self.scale = torch.ones_like(self.moments)
        """Public scale of each coordinate."""

    def clip_physical_batch(
        self,
        inputs: Any,
        targets: Any,
        basis: PublicBasis | None,
        present: Tensor | None,
        counts: Tensor | None,
    ) -> ClippedSum:
        tape = self.gradients.record(inputs, targets)
        occupied = occupied_tape(tape, self.gradients.reduction, present, counts)
        return self.plan.clipping.clip(ScaledTape(occupied, self.scale))

    def apply(self, update: Tensor) -> None:
        """Scale the update back, run the optimizer, and compute the scale of the next step."""
        update = update / self.scale
        super().apply(update)
        self.moments = self.decay * self.moments + (1 - self.decay) * update**2
        roots = self.moments.sqrt()
        scale = 1 / (roots + self.floor * roots.square().mean().sqrt())
        self.scale = scale / scale.square().mean().sqrt()

    def state_dict(self) -> dict[str, Any]:
        raise Unsupported("ScaledStep has no checkpoints: its scale would start again.")


class AdamBC(torch.optim.Optimizer):
    """Adam whose second moments are corrected for the variance of the noise.

    Args:
        params: Parameters to train.
        lr: Learning rate.
        deviation: Standard deviation of the noise on a coordinate of the mean gradient.
        floor: Smallest corrected second moment.
        betas: Decay of the first and second moments.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        deviation: float,
        floor: float,
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.deviation, self.floor, self.betas = deviation, floor, betas

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        first, second = self.betas
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                own = self.state[value]
                if not own:
                    own |= {"steps": 0, "mean": torch.zeros_like(value)}
                    own["square"] = torch.zeros_like(value)
                own["steps"] += 1
                own["mean"].lerp_(value.grad, 1 - first)
                own["square"].lerp_(value.grad**2, 1 - second)
                mean = own["mean"] / (1 - first ** own["steps"])
                square = own["square"] / (1 - second ** own["steps"]) - self.deviation**2
                value.sub_(group["lr"] * mean / square.clamp(min=self.floor).sqrt())
