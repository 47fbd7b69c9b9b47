"""Whether a private step computes the clipped sum that it is timed for, against one record at a time."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from training_steps import LEARNING_RATE, Step, Task

TOLERANCE = 0.05  # far above single precision's rounding of a step, far below a norm that is wrong


def disagreement(
    make: Callable[[nn.Module, Task], Step],
    network: Callable[[bool], nn.Module],
    task: Task,
    peer: bool,
) -> float:
    """Relative distance of a step's update, almost without noise, from the mean of clipped gradients.

    It is that of the second step: by then nothing that hooks keep is fresh any more.
    """
    quiet = replace(task, noise_multiplier=1e-6, clip_norm=0.1)  # so that every record is clipped
    model, twin = network(peer).float().train(), network(peer).float().train()
    step = make(model, quiet)
    step()
    twin.load_state_dict(model.state_dict())
    before = _flat(model)
    step()
    update = (before - _flat(model)) / LEARNING_RATE
    expected = clipped_mean(twin, quiet)
    return float((update - expected).norm() / expected.norm())


def clipped_mean(model: nn.Module, task: Task) -> Tensor:
    """Mean of clipped gradients, computed one record at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros_like(_flat(model))
    for x, y in zip(task.inputs.split(1), task.targets.split(1), strict=True):
        loss = task.loss(model(x), y)
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
        total += gradient * (task.clip_norm / gradient.norm()).clamp(max=1)
    return total / len(task)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
