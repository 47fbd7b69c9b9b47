"""Linear probing on fixed features, per-instance costs: Figures 3 and 4 of the bounded-support paper.

The paper's features (BEiT, ViT) are not to be had. Here: scattering of Fashion-MNIST, averaged over a
2 x 2 grid, each brought to mean 0 and variance 1 on the first 2,000 training images, which are taken
for public and not trained on. The 10,000 after them are: thinned, to take minutes on a CPU.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hush
from hush.accounting.numerics import Array
from hush.accounting.per_instance import individual_rdp, unit_law
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.core.parts import Noise
from hush.data import load, tensors, with_features
from hush_recipes.bounded.linear import LinearDescent

DATA, CLASSES, DELTA = "fashion-mnist", 10, 1e-5
PUBLIC, RECORDS = 2000, 10_000
CLIP, STEPS = 0.2, 20
LEARNING_RATE = 1.0
ORDERS = np.array([4.0, 8.0, 16.0, 32.0, 64.0])
SCALES = tuple(float(scale) for scale in np.geomspace(250, 2000, 7).round())
"""Deviation of the noise on the sum, over the clipping bound."""
BOUNDS = (0.5, 1.5)
"""Half the width of the support, over that deviation."""
KINDS = ("Gaussian", "rectified", "truncated")
_LEAST = 1e-3
"""A feature that hardly moves on the public records is not blown up on the others."""


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One mechanism of the grid."""

    kind: str
    scale: float
    bound: float | None
    clip: float = CLIP

    def plan(self) -> hush.Plan:
        deviation = self.scale * self.clip
        noise: Noise = hush.Gaussian(multiplier=self.scale)
        if self.bound is not None:
            law = hush.Rectified if self.kind == "rectified" else hush.Truncated
            noise = law(scale=deviation, bound=self.bound * deviation)
        return hush.Plan(sampling=hush.FullBatch(), clipping=hush.Linf(norm=self.clip), noise=noise)


def grid() -> list[GridPoint]:
    """The whole grid."""
    bounds: dict[str, tuple[float | None, ...]] = {
        kind: (None,) if kind == "Gaussian" else BOUNDS for kind in KINDS
    }
    return [
        GridPoint(kind=kind, scale=scale, bound=bound)
        for kind in KINDS
        for scale in SCALES
        for bound in bounds[kind]
    ]


def features(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test records with their classes."""
    x, y, x_test, y_test = tensors(with_features(load(DATA), "scattering", device=device))
    private = slice(PUBLIC, PUBLIC + RECORDS)
    train, test = standardised(_pooled(x[: private.stop]), _pooled(x_test))
    return train.to(device), y[private].to(device), test.to(device), y_test.to(device)


def standardised(x: Tensor, x_test: Tensor) -> tuple[Tensor, Tensor]:
    """All but the public records, and the test records, by the public ones' means and deviations."""
    mean, deviation = x[:PUBLIC].mean(0), x[:PUBLIC].std(0).clamp(min=_LEAST)
    return (x[PUBLIC:] - mean) / deviation, (x_test - mean) / deviation


def _pooled(images: Tensor) -> Tensor:
    few = images.split(2000)
    return torch.cat([nn.functional.adaptive_avg_pool2d(part, 2).flatten(1) for part in few])


def one_sided(plan: hush.Plan, location: Array, orders: Array) -> Array:
    """RDP that Algorithm 1 of the paper charges for a step: one direction, one sign."""
    support, scale = unit_law(plan.noise, plan.clipping.reference_norm)
    shift = np.full(len(location), plan.clipping.reference_norm / scale)
    return np.array([support.divergence(location / scale, shift, order).sum() for order in orders])


class Watched(LinearDescent):
    """A descent that sums the per-instance RDP of its steps, sound and by the paper's algorithm.

    Sums of one run, and no guarantee for another: docs/guarantees/filter.md.
    """

    def __init__(self, *args: Any, charging: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.charging = charging
        self.location: Array = np.zeros(0)
        self._charged, self._paper = np.zeros(len(ORDERS)), np.zeros(len(ORDERS))

    def _step_sum(self) -> Tensor:
        total = super()._step_sum()
        self.location = total.reshape(-1).cpu().numpy().copy()  # noise comes in place
        if self.charging:
            self._paper += one_sided(self.plan, self.location, ORDERS)
            self._charged += individual_rdp(self.plan, self.location, ORDERS)
        return total

    def charged(self) -> float:
        """Epsilon by both directions and the worse sign of each number."""
        return rdp_to_epsilon(self._charged, ORDERS, DELTA)

    def paper(self) -> float:
        """Epsilon by Algorithm 1: one direction, one sign."""
        return rdp_to_epsilon(self._paper, ORDERS, DELTA)


def descent(
    point: GridPoint,
    x: Tensor,
    y: Tensor,
    seed: int,
    *,
    charging: bool = True,
    learning_rate: float = LEARNING_RATE,
) -> Watched:
    """From zero weights; `charging` it takes longer than running it."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return Watched(
        x, y, point.plan(), classes=CLASSES, lr=learning_rate, generator=generator, charging=charging
    )


def accuracy(weights: Tensor, x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * float(((x @ weights.T).argmax(1) == y).double().mean())
