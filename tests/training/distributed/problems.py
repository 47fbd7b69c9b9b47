"""Small problems that the ranks of a group train on."""

from typing import Any

import torch
from torch import Tensor, nn

import hush
from hush.training.step import PrivateStep

RECORDS, RATE = 40, 0.25


def model_of(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5))


def data_of(seed: int = 0, records: int = RECORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        3 * torch.randn(records, 8, generator=generator),
        torch.randint(0, 5, (records,), generator=generator),
    )


def plan_of(**parts: Any) -> hush.Plan:
    usual = {
        "sampling": hush.Poisson(rate=RATE),
        "clipping": hush.L2(norm=1.0),
        "noise": hush.Gaussian(multiplier=1.0),
    }
    return hush.Plan(**{**usual, **parts})


def step_of(model: nn.Module | None = None, **options: Any) -> PrivateStep:
    model = model_of() if model is None else model
    plan = options.pop("plan", None) or plan_of()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9
    )
    usual: dict[str, Any] = {"records": RECORDS, "execution": hush.Execution(physical_batch=5)}
    return PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, **{**usual, **options})


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weights_of(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in model.state_dict().values()])
