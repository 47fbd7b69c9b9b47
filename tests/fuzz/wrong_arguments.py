"""Arguments that mean nothing, and data that cannot be drawn from."""

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

import hush
from tests.fuzz.mistake import STRANGE, WRONG, Mistake
from tests.training.grouped import grouped

_PLAN = hush.Plan(
    sampling=hush.Poisson(rate=0.5), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=2.0)
)
_SHOWN = hush.Plan(
    sampling=hush.FullBatch(),
    clipping=hush.Linf(norm=1.0),
    noise=hush.Rectified(scale=2.0, bound=3.0),
)
_BUDGET = hush.Budget(epsilon=50.0, delta=1e-5)


def _usual() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(6, 3), torch.zeros(6, dtype=torch.int64)


def a_step(folder: Path, **changed: Any) -> hush.PrivateStep:
    """A private step of the usual plan, with something else in place of what is usual."""
    model = changed.pop("model", None) or nn.Linear(3, 2)
    optimizer = changed.pop("optimizer", torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1))
    if isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = changed.pop("loss", nn.CrossEntropyLoss())
    plan = changed.pop("plan", _PLAN)
    settings = {"records": 6, "ledger": folder / "ledger.jsonl", **changed}
    return hush.PrivateStep(model, loss, optimizer, plan, **settings)


def one_step(folder: Path, data: Any = None, steps: Any = 1, **changed: Any) -> None:
    step = a_step(folder, **changed)
    for batch in step.batches(_usual() if data is None else data, steps=steps):
        step(batch)


def a_run(folder: Path, **changed: Any) -> None:
    model = nn.Linear(3, 2)
    plan, data = changed.pop("plan", _PLAN), changed.pop("data", _usual())
    settings = {"budget": _BUDGET, "steps": 2, "directory": folder / "run", **changed}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hush.train(model, nn.CrossEntropyLoss(), optimizer, plan, data, **grouped(settings))


def argument(pick: Random, folder: Path) -> Mistake:
    """A public function with an argument that means nothing."""
    whole = [value for value in WRONG if value is not None]
    counted = [value for value in whole if not isinstance(value, int) or value != 0] + [1.5, -3]
    flags = ["yes", "no", "", 0, 1, 0.5, [True], np.nan]
    chances = [*whole, 1, 1.5]
    shapes = [v for v in whole if not isinstance(v, list | tuple | range | np.ndarray | torch.Tensor)]
    calls: list[tuple[str, list[Any], Callable[[Any], object]]] = [
        ("plan", whole, lambda v: hush.epsilon(v, 3, 1e-5)),
        ("plan", whole, lambda v: hush.rdp(v, [2.0])),
        ("plan", whole, lambda v: hush.calibrate(v, _BUDGET, 3)),
        ("plan", whole, lambda v: hush.fit_noise(v, _BUDGET, 3)),
        ("plan", whole, lambda v: hush.mean(torch.zeros(3, 2), v, delta=1e-5)),
        ("plan", whole, lambda v: hush.individual_rdp(v, [0.0], [2.0])),
        ("plan", whole, lambda v: hush.fisher(v, [0.0])),
        ("plan", whole, lambda v: a_step(folder, plan=v)),
        ("plan", whole, lambda v: a_run(folder, plan=v)),
        ("plan", whole, lambda v: hush.Ledger().charge(v, run="r", step=1, release="x")),
        ("budget", whole, lambda v: hush.calibrate(_PLAN, v, 3)),
        ("budget", whole, lambda v: hush.fit_noise(_PLAN, v, 3)),
        ("budget", whole, lambda v: a_run(folder, budget=v)),
        ("steps", counted, lambda v: hush.epsilon(_PLAN, v, 1e-5)),
        ("steps", counted, lambda v: hush.calibrate(_PLAN, _BUDGET, v)),
        ("steps", counted, lambda v: hush.fit_noise(_PLAN, _BUDGET, v)),
        ("steps", counted, lambda v: one_step(folder, steps=v)),
        ("steps", [*counted, 0], lambda v: a_run(folder, steps=v)),
        ("every", [*counted, 0], lambda v: a_run(folder, every=v)),
        ("delta", chances, lambda v: hush.epsilon(_PLAN, 3, v)),
        ("delta", chances, lambda v: hush.mean(torch.zeros(3, 2), _SHOWN, delta=v)),
        ("delta", chances, lambda v: hush.Ledger().epsilon(v)),
        ("mode", whole, lambda v: hush.epsilon(_PLAN, 3, 1e-5, mode=v)),
        ("dimension", [*counted, 0], lambda v: hush.epsilon(_SHOWN, 3, 1e-5, dimension=v)),
        ("orders", whole, lambda v: hush.rdp(_PLAN, v)),
        ("orders", [1.0, -2.0, math.nan, math.inf, 1e9], lambda v: hush.rdp(_PLAN, [v])),
        ("location", shapes, lambda v: hush.fisher(_SHOWN, v)),
        ("location", shapes, lambda v: hush.individual_rdp(_SHOWN, v, [2.0])),
        ("noise", whole, lambda v: hush.noise.sample(v, (2,))),
        ("norm", [*whole, -0.0], lambda v: hush.noise.sample(_PLAN.noise, (2,), norm=v)),
        ("generator", whole, lambda v: hush.noise.sample(_PLAN.noise, (2,), generator=v)),
        ("model", [0.5, "model", [1], int], lambda v: a_step(folder, model=v)),
        ("optimizer", whole, lambda v: a_step(folder, optimizer=v)),
        ("loss", [0.5, "loss", [1], None], lambda v: a_step(folder, loss=v)),
        ("records", [*counted, 0], lambda v: a_step(folder, records=v)),
        (
            "physical_batch",
            [*counted, 0],
            lambda v: a_step(folder, execution=hush.Execution(physical_batch=v)),
        ),
        ("generator", whole, lambda v: a_step(folder, randomness=hush.Randomness(generator=v))),
        ("replay", flags, lambda v: a_step(folder, execution=hush.Execution(replay=v))),
        ("secure", [*flags, None], lambda v: a_step(folder, randomness=hush.Randomness(secure=v))),
        ("secure", [*flags, None], lambda v: hush.noise.sample(_PLAN.noise, (2,), secure=v)),
        (
            "arithmetic",
            [*flags, None],
            lambda v: a_step(folder, randomness=hush.Randomness(arithmetic=v)),
        ),
        ("units", whole, lambda v: a_step(folder, units=v)),
        ("randomness", whole, lambda v: a_step(folder, randomness=v)),
        ("resume", [*flags, None], lambda v: a_run(folder, resume=v)),
        ("reseed", [*flags, None], lambda v: a_run(folder, reseed=v)),
        ("progress", [*flags, None], lambda v: a_run(folder, progress=v)),
        ("views", [0.5, "views", [1], 4], lambda v: a_step(folder, views=v)),
        ("path", [0.5, [1], object(), b"name"], lambda v: a_step(folder, ledger=v)),
        ("directory", [0.5, [1], object(), b"name"], lambda v: a_run(folder, directory=v)),
        ("scheduler", whole, lambda v: a_run(folder, scheduler=v)),
        ("step", [*counted, 0], lambda v: hush.Ledger().charge(_PLAN, run="r", step=v, release="x")),
        ("run", [1, None, b"r"], lambda v: hush.Ledger().charge(_PLAN, run=v, step=1, release="x")),
        ("release", [1, None], lambda v: hush.Ledger().charge(_PLAN, run="r", step=1, release=v)),
        ("state", whole, lambda v: a_step(folder).load_state_dict(v)),
    ]
    name, values, call = pick.choice(calls)
    wrong = pick.choice([v for v in values if not (name == "orders" and isinstance(v, range | tuple))])
    if name == "state" and isinstance(wrong, dict):
        return Mistake(f"state={wrong!r}", lambda: call(wrong), "plan")
    return Mistake(f"{name}={wrong!r} ({calls.index((name, values, call))})", lambda: call(wrong), name)


def records(pick: Random, folder: Path) -> Mistake:
    """Records that cannot be drawn, or are not the ones the step was made for."""
    inputs, targets = _usual()
    wrong: list[tuple[str, Any]] = [
        ("records", (inputs[:4], targets[:4])),
        ("inputs", (inputs, targets[:4])),
        ("no records", (inputs[:0], targets[:0])),
        ("shape ()", (torch.tensor(1.0), torch.tensor(1))),
        ("tensors", (inputs, inputs, targets)),
        *((type(value).__name__, value) for value in STRANGE if not callable(value)),
    ]
    named, data = pick.choice(wrong)
    if data is None or isinstance(data, str | bytes | range):
        named, data = "records", (inputs[:4], targets[:4])
    if pick.random() < 0.5 and named != "records":
        return Mistake(f"train on {named}", lambda: a_run(folder, data=data), "record")
    return Mistake(f"step on {named}", lambda: one_step(folder, data=data), "record")
