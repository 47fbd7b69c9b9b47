"""Private steps of ordinary models beside autograd, one record at a time.

A case is a model, a loss of one value a record, and records.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import hush
from hush.core.errors import PrivacyWarning
from tests.training import helpers
from tests.training.helpers import plan_of

RECORDS, NORM = 4, 0.5

Case = tuple[Callable[[], nn.Module], Any, Callable[[], tuple[Any, Any]]]


def clipped_sum(model: nn.Module, loss: Any, inputs: Any, targets: Any) -> Tensor:
    """The sum of the clipped gradients of all records, each from a backward pass of its own."""
    parameters = [value for value in model.parameters() if value.requires_grad]
    total = torch.zeros(sum(value.numel() for value in parameters), dtype=torch.float64)
    for i in range(RECORDS):
        x, y = (_row(part, i) for part in (inputs, targets))
        outputs = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
        gradients = torch.autograd.grad(loss(outputs, y).sum(), parameters, allow_unused=True)
        pairs = zip(gradients, parameters, strict=True)
        own = torch.cat(
            [(torch.zeros_like(v) if g is None else g.to_dense()).flatten() for g, v in pairs]
        ).double()
        total += own * min(1.0, NORM / max(float(own.norm()), 1e-30))
    return total


def _row(value: Any, i: int) -> Any:
    if isinstance(value, Tensor):
        return value[i : i + 1]
    if isinstance(value, dict):
        return {key: _row(part, i) for key, part in value.items()}
    return tuple(_row(part, i) for part in value)


def step_of(model: nn.Module, loss: Any, **options: Any) -> hush.PrivateStep:
    plan = options.pop("plan", None) or plan_of(clipping=hush.L2(NORM))
    return helpers.step_of(model, plan, loss, lr=1e-3, records=RECORDS, **options)


def check(case: Case, *, draws: bool = False, dtype: torch.dtype = torch.float64) -> None:
    """Two private steps, the first one's clipped sum compared with the oracle's unless it draws."""
    torch.manual_seed(0)
    make, loss, data = case
    model = make().to(dtype).train()
    inputs, targets = _cast(data(), dtype)
    tolerance = 1e-6 if dtype == torch.float64 else 1e-3
    step = step_of(model, loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        for batch in step.batches((inputs, targets), steps=2):
            if step.steps == 0 and not draws:
                expected = clipped_sum(model, loss, inputs, targets)
                total = step.clipped_sum(batch).clone()
                assert float(expected.norm()) > 0
                torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance * NORM)
            step(batch)
    assert step.steps == 2
    assert all(bool(value.isfinite().all()) for value in model.parameters())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(part, dtype) for key, part in value.items()}
    return tuple(_cast(part, dtype) for part in value)


# losses of one value a record


def label(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(getattr(outputs, "logits", outputs), targets, reduction="none")


def next_word(outputs: Any, tokens: Tensor) -> Tensor:
    scores = getattr(outputs, "logits", outputs)[:, :-1].transpose(1, 2)
    return F.cross_entropy(scores, tokens[:, 1:], reduction="none").mean(1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().flatten(1).mean(1)


# records


def labels(classes: int = 3) -> Tensor:
    return torch.arange(RECORDS) % classes


def vectors(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, size), labels()


def images(channels: int = 3, size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, channels, size, size), labels()


def pictures() -> tuple[Tensor, Tensor]:
    x = torch.randn(RECORDS, 1, 8, 8)
    return x, x


def masks() -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, 3, 8, 8), torch.randint(0, 2, (RECORDS, 8, 8))


def sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, 5, 6), labels()


def signals() -> tuple[Tensor, Tensor]:
    return torch.randn(RECORDS, 2, 16), labels()


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(1, 20, (RECORDS, 6)), labels()


def text() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1, 20, (RECORDS, 6))
    return tokens, tokens


# models


class Of(nn.Module):
    """A model of named layers and a function of them and of the inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def head(width: int, classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def convolution(inward: int, outward: int, size: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inward, outward, size, padding=size // 2, bias=False, **options),
        nn.GroupNorm(2, outward),
        nn.ReLU(inplace=True),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def residual(width: int) -> nn.Module:
    body = nn.Sequential(convolution(width, width), nn.Conv2d(width, width, 3, padding=1))
    return Of(lambda m, x: F.relu(m.body(x) + x), body=body)


def resnet() -> nn.Module:
    return nn.Sequential(
        convolution(3, 4), residual(4), convolution(4, 8, stride=2), residual(8), head(8)
    )


def mlp_of(inward: int, outward: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inward, 8), nn.Tanh(), nn.Linear(8, outward))


def unet() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Any:
        top = m.down(x)
        middle = m.middle(F.max_pool2d(top, 2))
        return m.last(torch.cat([top, m.up(middle)], 1))

    up = nn.ConvTranspose2d(8, 4, 2, stride=2)
    return Of(forward, down=convolution(3, 4), middle=convolution(4, 8), up=up, last=nn.Conv2d(8, 2, 1))
