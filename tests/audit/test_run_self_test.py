"""The self-test: passes on what is charged, raises one message on what is not, and leaves no trace."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import hush
from hush.audit import self_test
from hush.cli.main import app
from hush.core.errors import Unsupported
from hush.core.plan import Plan
from hush.training.loop import Run
from tests.audit import sabotage
from tests.audit.sabotage import plan_of
from tests.audit.test_sabotage import MOMENTUM
from tests.training import helpers

RECORDS = 60
SELECTIVE = hush.Selective(rate=0.5, clip=1e-2, multiplier=1.0, threshold=0.0, test="mean")


def records(seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(RECORDS, 8, generator=source), torch.arange(RECORDS) % 5


def step_of(plan: Plan) -> hush.PrivateStep:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 5))
    execution = hush.Execution(physical_batch=16)
    return helpers.step_of(model, plan, make=MOMENTUM, seed=1, records=RECORDS, execution=execution)


PLANS = {
    "plain": plan_of(),
    "selective": plan_of(release=SELECTIVE),
    "masks": plan_of(
        sampling=hush.Twice(rate=0.5, coordinate_rate=0.5), clipping=hush.L2Linf(l2=1.0, linf=0.2)
    ),
    "quantile": plan_of(clipping=hush.Quantile(1.0)),
    "banded": plan_of(
        sampling=hush.CyclicPoisson(rate=0.5, cycle=3),
        noise=hush.Banded(multiplier=1.0, strategy=(1.0, 0.5)),
    ),
    "allocation": plan_of(sampling=hush.RandomAllocation(steps=3)),
    "bounded": plan_of(clipping=hush.Linf(0.1), noise=hush.Rectified(scale=2.0, bound=9.0)),
}


def weights(step: hush.PrivateStep, steps: int) -> list[Tensor]:
    for batch in step.batches(records(), steps=steps):
        step(batch)
    return [value.detach().clone() for value in step.model.parameters()]


@pytest.mark.parametrize("name", PLANS)
def test_it_passes_and_the_run_is_the_one_without_it(name: str) -> None:
    expected = weights(step_of(PLANS[name]), 3)
    step = step_of(PLANS[name])
    state = copy.deepcopy(step.state_dict())
    self_test(step, records())
    assert torch.equal(step.state_dict()["generator"], state["generator"])
    assert not step.ledger.counts
    assert step.update is None
    actual = weights(step, 3)
    assert step.ledger.counts == {PLANS[name]: 3}
    assert all(map(torch.equal, actual, expected))


SLOW = pytest.mark.slow
"""Each check is tried by itself in test_sabotage.py; here, whether the self-test runs it."""


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (sabotage.a_quarter_of_the_noise, "plain"),
        (sabotage.no_clipping_far_out, "plain"),
        (sabotage.a_bare_number_in_a_buffer, "plain"),
        (sabotage.a_quarter_of_the_noise_in_the_test, "selective"),
        (sabotage.groups_of_chance, "banded"),
        pytest.param(sabotage.noise_in_proportion_to_the_batch, "plain", marks=SLOW),
        pytest.param(sabotage.reseeded_every_step, "plain", marks=SLOW),
        pytest.param(sabotage.records_drawn_in_pairs, "plain", marks=SLOW),
        pytest.param(sabotage.every_second_step_uncharged, "plain", marks=SLOW),
        pytest.param(sabotage.tested_on_the_training_batch, "selective", marks=SLOW),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_what_is_not_as_charged_stops_it_with_one_message(
    broken: sabotage.Sabotage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(PLANS[name])
    before = [value.detach().clone() for value in step.model.parameters()]
    broken(monkeypatch)
    with pytest.raises(Unsupported) as raised:
        self_test(step, records())
    assert str(raised.value).startswith("The self-test failed: the step violates its guarantee")
    assert "largest" not in dict(step.model.named_buffers())
    assert not step.ledger.counts
    assert all(map(torch.equal, before, step.model.parameters()))


def train(directory: Path | None, check: Any) -> Run:
    return helpers.train(
        nn.Linear(8, 5), plan_of(), records(), steps=2, directory=directory, self_test=check
    )


def test_a_run_begins_only_if_it_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(tmp_path / "sound", self_test).steps == 2
    sabotage.a_quarter_of_the_noise(monkeypatch)
    with pytest.raises(Unsupported, match="self-test"):
        train(tmp_path / "broken", self_test)
    assert not (tmp_path / "broken").exists()


def test_the_command_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(folder: Path) -> Result:
        arguments = ["train", "--self-test", "--steps", 1, "--run-dir", folder]
        return CliRunner().invoke(app, list(map(str, arguments)))

    sabotage.every_second_step_uncharged(monkeypatch)
    refused = call(tmp_path / "broken")
    assert isinstance(refused.exception, Unsupported)
    assert not (tmp_path / "broken").exists()
    monkeypatch.undo()
    assert call(tmp_path / "sound").exit_code == 0
