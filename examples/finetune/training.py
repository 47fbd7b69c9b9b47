"""Training of the classifier with and without privacy, and of a head on frozen features."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hush
from hush.core.errors import InvalidValue
from hush.core.value import Value, check_count, number
from hush.training.evaluate import evaluate

_POSITIVE = number(above=0, at_most=1e12, why="nothing would be trained by it", example=1.0)


@dataclass(frozen=True, kw_only=True)
class Settings(Value):
    """Choices of a run, made on validation records or on public data."""

    learning_rate: float = field(metadata=_POSITIVE)
    batch: int
    """Records a step: expected, where drawn by chance."""
    steps: int
    clip: float = field(default=0.1, metadata=_POSITIVE)
    rank: int = 8
    alpha: float = field(default=32.0, metadata=_POSITIVE)
    targets: tuple[str, ...] = ("query", "value")
    train_a: bool = True
    """Whether both factors of a LoRA are trained; else the one that begins with zeros alone."""
    head_scale: float = field(default=2.0, metadata=_POSITIVE)
    head_rate: float = field(default=1.0, metadata=_POSITIVE)
    """Factor on the head's learning rate."""
    sentences: bool = True
    """Whether the head begins with public sentences; else with zeros."""
    length: int = 256
    first: int = 0
    """Tokens from the beginning of a review that is longer than `length`."""
    warmup: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("batch", "steps", "rank", "warmup"):
            check_count(name, getattr(self, name), "nothing would be trained", at_least=1)
        check_count("length", self.length, "a row has [CLS], [SEP] and a token at least", at_least=3)
        room = self.length - 2
        if check_count("first", self.first, "it is a number of tokens") > room:
            raise InvalidValue(
                f"first={self.first} tokens and [CLS] and [SEP] do not fit a length of {self.length}. "
                f"Pass first={room} at most, or a larger length."
            )
        if not self.targets:
            raise InvalidValue(
                'targets=[] has no matrix to train a LoRA on. Pass e.g. targets=["query", "value"].'
            )


def low_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Context of mixed precision: matrix products in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16)


def schedule(optimizer: torch.optim.Optimizer, settings: Settings) -> torch.optim.lr_scheduler.LambdaLR:
    """Learning rate that rises for some steps, and falls to zero."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / settings.warmup) * (1 - step / settings.steps)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def optimizer_of(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Adam over what is trained, with a learning rate of its own for the head."""
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    head = [value for name, value in trained if ".head." in f".{name}"]
    rest = [value for name, value in trained if ".head." not in f".{name}"]
    rate = settings.learning_rate
    groups = [(head, rate * settings.head_rate), (rest, rate)]
    return torch.optim.Adam([{"params": params, "lr": each} for params, each in groups if params])


def plan_for(settings: Settings, budget: hush.Budget, records: int) -> hush.Plan:
    """DP-SGD with noise just large enough for the budget."""
    plan = hush.Plan(
        sampling=hush.Poisson(rate=settings.batch / records),
        clipping=hush.L2(norm=settings.clip),
        noise=hush.Gaussian(multiplier=1.0),
    )
    return hush.calibrate(plan, budget, steps=settings.steps)


def train_private(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    settings: Settings,
    budget: hush.Budget,
    generator: torch.Generator | None = None,
) -> hush.Guarantee:
    """Train with differential privacy, in place.

    Args:
        model: whose trainable parameters are moved.
        data: private inputs and labels.
        settings: of the run.
        budget: of the run; the noise is calibrated to it.
        generator: makes the run repeatable, for comparisons; None: secret randomness.

    Returns:
        The guarantee of the run at the budget's delta.
    """
    optimizer = optimizer_of(model, settings)
    scheduler = schedule(optimizer, settings)
    step = hush.PrivateStep(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        plan_for(settings, budget, len(data[1])),
        records=len(data[1]),
        randomness=hush.Randomness(generator=generator),
        execution=hush.Execution(replay=False),  # long texts keep a GPU busy without a CUDA graph
    )
    with low_precision(data[1].device):
        for batch in step.batches(data, steps=settings.steps):
            step(batch)
            scheduler.step()
    return step.spent(budget.delta)


def train_plain(
    model: nn.Module, data: tuple[Tensor, Tensor], settings: Settings, generator: torch.Generator
) -> None:
    """Train without privacy, in place: the same but for clipping, noise and sampling by chance."""
    optimizer = optimizer_of(model, settings)
    scheduler = schedule(optimizer, settings)
    loss = nn.CrossEntropyLoss()
    batches = _epochs(len(data[1]), settings.batch, generator)
    for _ in range(settings.steps):
        rows = next(batches).to(data[1].device)
        with low_precision(data[1].device):
            value = loss(model(data[0][rows]), data[1][rows])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def _epochs(records: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(records, generator=generator).split(batch)


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Percentage of records that are classified right, uncharged: not for training records."""
    with low_precision(data[1].device):
        return 100 * evaluate(model, nn.CrossEntropyLoss(), data)["accuracy"]


@torch.no_grad()
def frozen_features(model: Any, tokens: Tensor, batch: int = 512) -> Tensor:
    """Embeddings of the encoder as it was pretrained."""
    with low_precision(tokens.device):
        return torch.cat([model.embed(part) for part in tokens.split(batch)])
