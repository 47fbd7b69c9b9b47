"""Figure 4 of the DPSUR paper: the change of the loss from model to model, and the clip of the test.

The paper's argument for a small clip is that nearly all changes lie outside of it, so that clipping
keeps their sign. The changes are those of the test batch and are private; here the records are public.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hush.clipping import L2
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.data import load, tensors
from hush.models import build
from hush.noise import Gaussian
from hush.report.text import Table
from hush.sampling import Poisson
from hush.training.methods.selective import Trials
from hush.training.options import Randomness
from hush.training.step import PrivateStep
from hush_recipes.figure import Figure

CLIP = 0.001
"""The paper's, as are the noise of the test and its threshold of -1."""
CLIPS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


class ObservedTrials(Trials):
    """Trials that keep the change of the mean loss before it is clipped (sensitive)."""

    def __init__(self, step: PrivateStep) -> None:
        super().__init__(step)
        self.changes: list[float] = []

    def bounded_rise(self, new: Tensor, old: Tensor) -> Tensor:
        self.changes.append(float((new - old).sum()) / self.sampling.expected(self.step.records))
        return super().bounded_rise(new, old)


def dpsur_fig4(
    *, data: str = "digits", model: str = "logistic", steps: int = 1000, seeds: int = 1
) -> Figure:
    """Changes of the loss that the test sees, accepted and rejected, and the share beyond the clip."""
    runs = [_run(data, model, steps, seed) for seed in range(seeds)]
    rows: list[list[Any]] = [
        [seed, k, change, accepted]
        for seed, (changes, verdicts) in enumerate(runs)
        for k, (change, accepted) in enumerate(zip(changes, verdicts, strict=True))
    ]
    changes, accepted = (np.concatenate([run[part] for run in runs]) for part in (0, 1))
    helpful = changes < 0

    def draw(panels: Any) -> None:
        first, verdicts = runs[0]
        for kind, name, color in ((verdicts, "accepted", "C0"), (~verdicts, "rejected", "0.6")):
            panels[0].plot(np.flatnonzero(kind), first[kind], ".", ms=3, color=color, label=name)
        limit = float(np.quantile(np.abs(changes), 0.95))
        bins = np.linspace(-limit, limit, 61)
        panels[1].hist([changes[accepted], changes[~accepted]], bins, stacked=True, color=["C0", "0.8"])
        for end in (-CLIP, CLIP):
            panels[0].axhline(end, color="0.4", lw=0.8)
            panels[1].axvline(end, color="0.4", lw=0.8)
        panels[0].set_yscale("symlog", linthresh=CLIP)
        panels[0].set(xlabel="trial", ylabel="change of the loss")
        panels[1].set(xlabel="change of the loss", ylabel="trials")
        panels[0].legend()

    return Figure(
        name="dpsur-fig4",
        title=f"{data}: change of the loss of the test batch, clip {CLIP:g} in grey",
        header=["seed", "trial", "change", "accepted"],
        rows=rows,
        draw=draw,
        panels=2,
        summary=Table(
            header=["clip", "changes beyond it"],
            rows=[[f"{clip:g}", f"{100 * np.mean(np.abs(changes) > clip):.1f}%"] for clip in CLIPS],
        ),
        notes=[
            f"{accepted[helpful].sum()} of {helpful.sum()} proposals that lower the tested loss are "
            f"accepted, and {accepted[~helpful].sum()} of {(~helpful).sum()} others",
        ],
    )


def _run(data: str, name: str, steps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Change of the loss and verdict of each trial."""
    torch.set_num_threads(1)
    dataset = load(data)
    x, y, _, _ = tensors(dataset)
    torch.manual_seed(seed)
    model = build(name, classes=dataset.classes, shape=x.shape[1:])
    plan = Plan(
        sampling=Poisson(rate=0.1),
        clipping=L2(norm=0.1),
        noise=Gaussian(multiplier=4.0),
        release=Selective(rate=256 / len(y), clip=CLIP, multiplier=1.0, test="mean"),
    )
    step = PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=4.0, momentum=0.9),
        plan,
        records=len(y),
        randomness=Randomness(generator=torch.Generator().manual_seed(seed)),
    )
    step.rule = trials = ObservedTrials(step)
    verdicts = [bool(step(batch)) for batch in step.batches((x, y), steps=steps)]
    return np.array(trials.changes), np.array(verdicts)
