"""Kill a run with SIGKILL at random moments, resume it, and compare with one that was let be."""

import json
import random
import signal
from pathlib import Path

import pytest

from tests import forked

STEPS = 12

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import hush

directory, kill_at = sys.argv[1], int(sys.argv[2])
events = 0

def event():
    global events
    events += 1
    if events == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

def watched(function):
    def call(*arguments):
        event()
        result = function(*arguments)
        event()
        return result
    return call

class WatchedSGD(torch.optim.SGD):
    def step(self, closure=None):
        event()
        super().step()
        event()

torch.manual_seed(5)
inputs, targets = torch.randn(40, 6), torch.randint(0, 3, (40,))
model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3))
optimizer = WatchedSGD(model.parameters(), lr=0.5, momentum=0.9)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[4, 9])
plan = hush.Plan(
    sampling=hush.Poisson(0.25),
    clipping=hush.L2(1.0),
    noise=hush.Gaussian(1.0),
)
# Seen around every write to disk and every update, which is where a crash could split something.
os.fsync, os.write = watched(os.fsync), watched(os.write)
hush.train(
    model,
    nn.CrossEntropyLoss(),
    optimizer,
    plan,
    (inputs, targets),
    budget=hush.Budget(epsilon=hush.epsilon(plan, steps=STEPS, delta=1e-5).epsilon.upper, delta=1e-5),
    steps=STEPS,
    scheduler=scheduler,
    evaluation=(inputs + 1, targets),
    logging=hush.Logging(every=3),
    checkpoints=hush.Checkpoints(directory=directory, resume=os.path.isdir(directory)),
    randomness=hush.Randomness(generator=torch.Generator().manual_seed(7)),
)
print(events)
""".replace("STEPS", str(STEPS))


def run(directory: Path, kill_at: int = 0) -> forked.Ended:
    return forked.run(SCRIPT, str(directory), str(kill_at))


def charges(directory: Path) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    return [(line["step"], line["release"]) for line in lines if "charge" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    directory = tmp_path_factory.mktemp("whole") / "run"
    result = run(directory)
    assert result.returncode == 0, result.stderr
    return directory, int(result.stdout)


def assert_same_end(directory: Path, whole: Path) -> None:
    for name in ("model.safetensors", "plan.toml", "metrics.jsonl"):
        assert (directory / name).read_bytes() == (whole / name).read_bytes(), name
    assert charges(directory) == charges(whole)
    assert [step for step, _ in charges(directory)] == list(range(1, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("point", range(10))
def test_a_killed_run_ends_like_one_that_was_not(
    tmp_path: Path, undisturbed: tuple[Path, int], point: int
) -> None:
    whole, events = undisturbed
    kill_at = random.Random(point).randint(1, events)
    directory = tmp_path / "run"
    killed = run(directory, kill_at)
    assert killed.returncode == -signal.SIGKILL
    resumed = run(directory)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_end(directory, whole)


def test_killed_between_the_charge_and_the_update(tmp_path: Path, undisturbed: tuple[Path, int]) -> None:
    """Kill again and again until the charge is on disk and its update is not."""
    whole, events = undisturbed
    directory = tmp_path / "run"
    actual = False
    for kill_at in range(events // 2, events):
        run(directory, kill_at)
        steps_charged = len(charges(directory))
        resumed_at = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        if steps_charged > resumed_at:
            actual = True
            break
    assert actual
    assert run(directory).returncode == 0
    assert_same_end(directory, whole)
