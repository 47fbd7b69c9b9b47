"""Section 6 of the twice-sampling paper: noise for two subspaces of a gradient, and what it turns.

The example: ranks 1000 and 290,898, norms 2.5 and 1. The other half, how clipping and noise turn the
mean gradient: gradients of 1,000 images after 100 steps of gradient descent; a principal subspace of
1,000 others' gradients, and the residual. Both clippings have one global norm, the mean length of a
gradient, shared out by the public gradients' lengths in the two subspaces; the noise is for epsilon 8,
delta 1e-5, 5,000 steps at rate .02. The paper has ResNet22 on CIFAR-10, rank 1000 (--model resnet22);
the default is a small network on Fashion-MNIST and rank 100.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hush.core.guarantee import Budget
from hush.core.parts import SensitivitySet
from hush.data import load, tensors
from hush.models import build
from hush.training.methods.public_bases import gradient_rows, principal_directions
from hush_recipes.figure import Figure
from hush_recipes.twice.geometry import LEARNING_RATE, MODEL, RECORDS
from hush_recipes.twice.geometry import STEPS as DESCENT_STEPS
from hush_recipes.twice.measured import descend
from hush_recipes.twice.settings import PARAMETERS
from hush_recipes.twice.shape import least_variance_noise

RANK, PRINCIPAL, RESIDUAL = 1000, 2.5, 1.0
BUDGET, STEPS, RATE = Budget(epsilon=8.0, delta=1e-5), 5000, 0.02
DRAWS = 20
# Printed: without noise, and how many times the second is of the first with it.
PRINTED = {"isotropic": (0.78, 1.0), "hybrid": (0.76, 2.9)}


def twice_section6() -> Figure:
    """Deviations in both subspaces and the variance over isotropic noise; the paper says 5.5 times."""
    blocks = [
        SensitivitySet(p=2.0, norm=PRINCIPAL, dimension=RANK),
        SensitivitySet(p=2.0, norm=RESIDUAL, dimension=PARAMETERS - RANK),
    ]
    shaped = least_variance_noise(blocks, rate=RATE, budget=BUDGET, steps=STEPS)
    isotropic = math.sqrt(shaped.isotropic / PARAMETERS)
    rows: list[list[object]] = [
        ["principal", RANK, PRINCIPAL, shaped.deviations[0], isotropic],
        ["residual", PARAMETERS - RANK, RESIDUAL, shaped.deviations[1], isotropic],
        [
            "total variance",
            PARAMETERS,
            math.hypot(PRINCIPAL, RESIDUAL),
            shaped.variance,
            shaped.isotropic,
        ],
    ]
    residuals = np.geomspace(0.05, 20, 80)
    ranks = np.sqrt([RANK, PARAMETERS - RANK])

    def gain(residual: float) -> float:
        norms = np.array([PRINCIPAL, residual])
        return float(PARAMETERS * (norms @ norms) / (norms @ ranks) ** 2)

    def draw(axes: Any) -> None:
        axes.loglog(residuals, [gain(float(norm)) for norm in residuals])
        axes.plot([RESIDUAL], [shaped.gain], "o", label=f"section 6: {shaped.gain:.2f} (printed: 5.5)")
        axes.set(
            xlabel="norm in the residual (2.5 in the principal subspace)", ylabel="gain in variance"
        )
        axes.legend()

    return Figure(
        name="twice-section6",
        title="Shaped over isotropic noise for ranks 1000 and 290,898",
        header=["part", "rank", "norm", "shaped", "isotropic"],
        rows=rows,
        draw=draw,
        notes=[
            f"isotropic noise has {shaped.gain:.2f} times the variance; printed: 5.5",
            "where noise dominates, the cosine with the true mean gains the root of that, "
            f"{shaped.gain**0.5:.2f}, times the ratio of the clipped means; printed: 2.9, with its own "
            "gradients",
        ],
    )


def twice_cosine(
    model: str = MODEL, *, device: str = "cpu", records: int = RECORDS, rank: int | None = None
) -> Figure:
    """Cosines between the mean gradient and what is released of it."""
    torch.manual_seed(0)
    data = load("fashion-mnist" if model == "mnist-cnn" else "cifar10")
    x, y = (value[: 2 * records].to(device) for value in tensors(data)[:2])
    network = build(model, classes=data.classes, shape=data.shape).to(device)
    loss = nn.CrossEntropyLoss()
    private = x[records:], y[records:]
    descend(network, loss, private, steps=DESCENT_STEPS, learning_rate=LEARNING_RATE)
    public, private_rows = (
        gradient_rows(network, loss, part) for part in ((x[:records], y[:records]), private)
    )
    rank = rank or (1000 if model == "resnet22" else 100)
    half = public[: records // 2].clone() if rank <= records // 2 else public.clone()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        basis = principal_directions(half, [rank], 4, generator)
        inside, residual = _parts(private_rows, basis)
        expected = [float(part.norm(dim=1).mean()) for part in _parts(public[records // 2 :], basis)]
        norm = float(private_rows.norm(dim=1).mean())
        shares = [norm * length / math.hypot(*expected) for length in expected]
        mean = private_rows.mean(0)
        clipped = {
            "isotropic": _clipped(private_rows, norm).mean(0),
            "hybrid": (_clipped(inside, shares[0]) @ basis.T + _clipped(residual, shares[1])).mean(0),
        }
    size = private_rows.shape[1]
    blocks = [
        SensitivitySet(p=2.0, norm=share, dimension=count)
        for share, count in zip(shares, (rank, size - rank), strict=True)
    ]
    shaped = least_variance_noise(blocks, rate=RATE, budget=BUDGET, steps=STEPS)
    isotropic = math.sqrt(shaped.isotropic / size)
    deviations = {"isotropic": (isotropic, isotropic), "hybrid": shaped.deviations}
    rows: list[list[Any]] = []
    for name, value in clipped.items():
        bare = _cosine(mean, value)
        noisy = [
            _cosine(mean, value + _noise(basis, deviations[name], generator) / records)
            for _ in range(DRAWS)
        ]
        rows.append([name, bare, sum(noisy) / DRAWS, *PRINTED[name]])
    for row in rows:
        row.insert(3, row[2] / rows[0][2])

    def draw(axes: Any) -> None:
        for column, row in enumerate(rows):
            axes.bar([column - 0.2, column + 0.2], row[1:3], 0.4, color=["C0", "C1"])
        axes.set_xticks(range(len(rows)), [row[0] for row in rows])
        axes.set(ylabel="cosine with the mean gradient (clipped; clipped and noisy)")

    return Figure(
        name="twice-cosine",
        title=f"{model}, {size} parameters, rank {rank}: what clipping and noise leave of the direction",
        header=["noise", "clipped", "noisy", "times", "printed clipped", "printed times"],
        rows=rows,
        draw=draw,
        notes=[
            f"clipping norms {shares[0]:.3g} and {shares[1]:.3g}, together {norm:.3g}; "
            f"isotropic noise has {shaped.gain:.2f} times the variance (printed: 5.5)",
            f"mean of {DRAWS} draws; the printed ones are for ResNet22 on CIFAR-10, norms 2.5 and 1",
        ],
    )


def _parts(rows: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The coefficients in the subspace, and what it leaves."""
    inside = rows @ basis
    return inside, rows - inside @ basis.T


def _clipped(rows: Tensor, norm: float) -> Tensor:
    clipped: Tensor = rows * (norm / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)
    return clipped


def _noise(basis: Tensor, deviations: tuple[float, ...], generator: torch.Generator) -> Tensor:
    """Normal noise of one deviation in the subspace, and of another outside."""
    draw = torch.randn(len(basis), generator=generator, device=basis.device)
    return deviations[1] * draw + (deviations[0] - deviations[1]) * (basis @ (basis.T @ draw))


def _cosine(first: Tensor, second: Tensor) -> float:
    return float(nn.functional.cosine_similarity(first, second, dim=0))
