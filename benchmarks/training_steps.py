"""Training steps to be timed beside each other: plain, hush's, those of Opacus and of fastDP.

Every one works on physical batches and moves the model once for all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import hush
from hush.core.parts import Clipping, Sampling
from hush.training.distributed.processes import Group

LEARNING_RATE = 0.01
EVERYONE = hush.FullBatch()
Step = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Task:
    """A logical batch and its loss."""

    inputs: Tensor
    targets: Tensor
    loss: Any = nn.CrossEntropyLoss()  # noqa: RUF009 - a loss has no state
    """A loss module that averages over records, and has a `reduction`."""
    physical: int | None = None
    """Records at a time; None: all, and as many as hush finds to fit."""
    bfloat16: bool = False
    """Whether forward passes are under autocast."""
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0

    def __len__(self) -> int:
        return len(self.inputs)

    def first(self, records: int) -> "Task":
        """The same task on fewer records."""
        return replace(self, inputs=self.inputs[:records], targets=self.targets[:records])

    def physical_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.physical or len(self)
        return zip(self.inputs.split(size), self.targets.split(size), strict=True)

    def autocast(self) -> torch.autocast:
        """Context of a forward pass and its loss; backward passes follow outside, as torch advises."""
        return torch.autocast(self.inputs.device.type, torch.bfloat16, enabled=self.bfloat16)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def plain(model: nn.Module, task: Task) -> Step:
    """A step without privacy, gradients accumulated over the physical batches."""
    optimizer = sgd(model)

    def step() -> None:
        for x, y in task.physical_batches():
            with task.autocast():
                loss = task.loss(model(x), y) * (len(x) / len(task))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def private(
    model: nn.Module,
    task: Task,
    *,
    replay: bool | None = None,
    sampling: Sampling = EVERYONE,
    clipping: Clipping | None = None,
    processes: Group = False,
) -> Step:
    """A step as a user of hush takes it, charge and all; autocast is around the whole of it."""
    plan = hush.Plan(
        sampling=sampling,
        clipping=clipping or hush.L2(norm=task.clip_norm),
        noise=hush.Gaussian(multiplier=task.noise_multiplier),
    )
    private_step = hush.PrivateStep(
        model,
        task.loss,
        sgd(model),
        plan,
        records=len(task),
        execution=hush.Execution(physical_batch=task.physical, replay=replay),
        distributed=hush.Distributed(processes=processes),
    )
    with task.autocast():
        batches = private_step.batches((task.inputs, task.targets))

    def step() -> None:
        with task.autocast():
            private_step(next(batches))

    return step


def opacus(mode: str) -> Callable[[nn.Module, Task], Step]:
    """A step of Opacus in the mode "hooks", "functorch" or "ghost"."""

    def make(model: nn.Module, task: Task) -> Step:
        from opacus import GradSampleModule
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizer
        from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        settings: dict[str, Any] = {
            "noise_multiplier": task.noise_multiplier,
            "max_grad_norm": task.clip_norm,
            "expected_batch_size": len(task),
        }
        loss = task.loss
        if mode == "ghost":
            wrapped = GradSampleModuleFastGradientClipping(
                model, max_grad_norm=task.clip_norm, use_ghost_clipping=True
            )
            optimizer = DPOptimizerFastGradientClipping(sgd(model), **settings)
            loss = DPLossFastGradientClipping(wrapped, optimizer, task.loss, "mean")
        else:
            wrapped = GradSampleModule(model, force_functorch=mode == "functorch")
            optimizer = DPOptimizer(sgd(model), **settings)

        def step() -> None:
            seen = 0
            for x, y in task.physical_batches():
                seen += len(x)
                optimizer.zero_grad()
                with task.autocast():
                    value = loss(wrapped(x), y)
                value.backward()
                optimizer.signal_skip_step(do_skip=seen < len(task))  # as its BatchMemoryManager does
                optimizer.step()

        return step

    return make


def fastdp(model: nn.Module, task: Task) -> Step:
    """A step of fastDP by mixed book-keeping (MixOpt), its default."""
    from fastDP import PrivacyEngine

    optimizer = sgd(model)
    engine = PrivacyEngine(
        model,
        batch_size=len(task),
        sample_size=len(task),
        epochs=1,
        noise_multiplier=task.noise_multiplier,
        max_grad_norm=task.clip_norm,
        clipping_fn="Abadi",
        clipping_mode="MixOpt",
        clipping_style="all-layer",
    )
    engine.attach(optimizer)

    def step() -> None:
        for x, y in task.physical_batches():
            with task.autocast():  # its hooks multiply what has different precisions
                task.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
