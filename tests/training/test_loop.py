import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hush
from hush.core.errors import (
    BudgetExceeded,
    CheckpointError,
    DataError,
    HushError,
    InvalidValue,
    PrivacyWarning,
)
from hush.training.checkpoint import load
from hush.training.loop import Run
from hush.training.trial import TuningTrial
from tests.training import helpers
from tests.training.helpers import plan_of, randomness, seeded

RECORDS = 50
PLAN = plan_of(hush.Poisson(0.2), noise=2.0)
GENEROUS = hush.Budget(epsilon=50.0, delta=1e-5)


def problem() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    data = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    return model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5), data


def held_out(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return data[0] + 1, data[1]


def train(
    plan: hush.Plan = PLAN,
    budget: hush.Budget = GENEROUS,
    *,
    of: tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]] | None = None,
    **options: Any,
) -> Run:
    model, optimizer, data = of or problem()
    options.setdefault("randomness", randomness(1))
    return helpers.train(model, plan, data, optimizer=optimizer, budget=budget, **options)


def test_the_epsilon_of_a_run_is_the_epsilon_of_its_plan() -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    run = train(steps=40)
    assert run.guarantee == replace(hush.epsilon(PLAN, steps=40, delta=1e-5), randomness="seeded")
    peer = pld.from_gaussian_mechanism(2.0, sampling_prob=0.2, value_discretization_interval=1e-4)
    reference = peer.self_compose(40).get_epsilon_for_delta(1e-5)
    assert run.guarantee.epsilon.upper == pytest.approx(reference, abs=1e-3)


def test_it_stops_before_the_step_that_would_go_over() -> None:
    cost = [hush.epsilon(PLAN, steps=n, delta=1e-5).epsilon.upper for n in (7, 8)]
    budget = hush.Budget(epsilon=sum(cost) / 2, delta=1e-5)
    with pytest.warns(UserWarning, match=r"the run ends after 7 of steps=30.*calibrate"):
        limited = train(budget=budget, steps=30)
    for run in (limited, train(budget=budget)):
        assert (run.steps, run.stopped) == (7, "budget")
        assert run.guarantee.epsilon.upper == cost[0] <= budget.epsilon
    assert train(budget=budget, steps=7).stopped == "steps"


PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(problem()[1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"plan": plan_of(PLAN.sampling, hush.Linf(1.0), hush.Laplace(1.0))}, "Laplace"),
        ({"budget": hush.Budget(epsilon=1e-3, delta=1e-5)}, "below the cost of one step"),
        ({"public": (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))}, "public"),
        ({"randomness": hush.Randomness(generator=3)}, "generator"),  # type: ignore[arg-type]
        ({"scheduler": PLATEAU}, "Pass evaluation data"),
    ],
    ids=["plan", "budget", "public", "generator", "schedule"],
)
def test_a_refused_run_leaves_nothing(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(HushError, match=message):
        train(directory=tmp_path / "runs" / "first", steps=2, **wrong)
    assert not list(tmp_path.iterdir())


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    model, optimizer, data = problem()
    run = train(
        of=(model, optimizer, data), steps=12, evaluation=held_out(data), directory=tmp_path / "run"
    )
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert lines == run.metrics
    assert [line["step"] for line in lines] == [5, 10, 12]
    assert lines[-1]["epsilon"] == run.guarantee.epsilon.upper
    assert set(lines[-1]) == {"step", "epsilon", "delta", "neighbours", "unit", "loss", "accuracy"}
    assert all(line["delta"] == run.guarantee.delta for line in lines)
    assert (lines[-1]["neighbours"], lines[-1]["unit"]) == ("zero-out", "one record")
    weights = safetensors.torch.load_file(tmp_path / "run/model.safetensors")
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())


def test_a_finished_run_can_be_resumed_to_more_steps(tmp_path: Path) -> None:
    whole = train(steps=20, directory=tmp_path / "whole")
    train(steps=8, directory=tmp_path / "parts")
    parts = train(steps=20, directory=tmp_path / "parts", resume=True)
    assert parts.guarantee == whole.guarantee
    name = "model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    repeated = train(steps=20, directory=tmp_path / "parts", resume=True)
    assert repeated.guarantee == whole.guarantee, "nothing left to do costs nothing"


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ],
)
def test_schedulers_move_and_survive_a_resume(tmp_path: Path, make: object) -> None:
    ends = []
    for parts in ([12], [5, 12]):
        folder = tmp_path / str(len(parts))
        for steps in parts:
            model, optimizer, data = problem()
            scheduler = make(optimizer)  # type: ignore[operator]
            start = optimizer.param_groups[0]["lr"]
            train(
                of=(model, optimizer, data),
                steps=steps,
                scheduler=scheduler,
                evaluation=held_out(data),
                every=1,
                directory=folder,
                resume=folder.exists(),
            )
        assert optimizer.param_groups[0]["lr"] != start
        ends.append((optimizer.param_groups[0]["lr"], (folder / "model.safetensors").read_bytes()))
    assert ends[0] == ends[1]


def test_a_delta_above_one_over_the_records_is_warned_of() -> None:
    with pytest.warns(PrivacyWarning, match=r"delta=0\.1 is above 1/50 .*drawn at random"):
        train(budget=hush.Budget(epsilon=50.0, delta=0.1), steps=1)


def test_a_printed_run_does_not_show_how_many_records_were_left_out() -> None:
    model, optimizer, (x, y) = problem()
    x[:7] = torch.nan
    run = train(plan_of(noise=2.0), of=(model, optimizer, (x, y)), steps=3)
    assert run.skipped == 21
    assert "skipped" not in repr(run)
    assert "21" not in f"{run}"


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_entry_that_no_record_has_is_refused_before_training(value: float, tmp_path: Path) -> None:
    model, optimizer, (x, y) = problem()
    x[:, 2] = value
    with pytest.raises(DataError, match=r"1 of the 4 entries .* NaN or infinite in every record"):
        train(of=(model, optimizer, (x, y)), steps=2, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    x[49, 2] = 0.0
    assert train(of=(model, optimizer, (x, y)), steps=2).steps == 2


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    for options in ({"resume": True}, {"reseed": True}, {"reseed": True, "directory": tmp_path / "a"}):
        with pytest.raises(CheckpointError, match="resume=True needs a directory"):
            train(steps=2, **options)
    with pytest.raises(CheckpointError, match="no run in"):
        train(steps=2, directory=tmp_path / "mistyped", resume=True)


WIDER = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
SGD, USUAL = torch.optim.SGD, {"lr": 0.3, "momentum": 0.5}


@pytest.mark.parametrize(
    ("model", "kind", "settings", "message"),
    [
        (None, SGD, {**USUAL, "lr": 0.1}, r"\(lr of group 0 was 0\.3 and is now 0\.1\)"),
        (None, SGD, {**USUAL, "momentum": 0.9}, r"\(momentum of group 0 was 0\.5 and is now 0\.9"),
        (None, SGD, {**USUAL, "weight_decay": 0.1}, r"weight_decay of group 0 was 0 and is now 0\.1"),
        (None, torch.optim.Adam, {"lr": 0.3}, "optimizer was SGD and is now Adam"),
        (WIDER, SGD, USUAL, "does not fit the model"),
    ],
    ids=["lr", "momentum", "weight decay", "optimizer", "model"],
)
def test_a_run_is_not_resumed_with_another_optimizer_or_model(
    model: nn.Module | None, kind: Any, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    train(directory=tmp_path / "run", steps=2)
    usual, _, data = problem()
    model = model or usual
    of = model, kind(model.parameters(), **settings), data
    with pytest.raises(CheckpointError, match=message):
        train(directory=tmp_path / "run", steps=3, resume=True, of=of)
    assert train(directory=tmp_path / "run", steps=3, resume=True).steps == 3


def test_runs_that_share_a_ledger_add_up_and_others_are_warned_of(tmp_path: Path) -> None:
    of, ledger = problem(), hush.Ledger()
    first = train(of=of, steps=3, ledger=ledger)
    both = train(of=of, steps=4, ledger=ledger)
    assert first.guarantee.epsilon == hush.epsilon(PLAN, steps=3, delta=1e-5).epsilon
    assert both.guarantee.epsilon == hush.epsilon(PLAN, steps=7, delta=1e-5).epsilon
    assert both.steps == 4
    cost = both.guarantee.epsilon.upper
    with pytest.raises(BudgetExceeded, match="with the charges on the ledger"):
        train(of=of, steps=1, ledger=ledger, budget=hush.Budget(epsilon=cost, delta=1e-5))
    assert ledger.counts == {PLAN: 7}, "still open, and no step was added"
    with pytest.warns(PrivacyWarning, match="two costs add up"):
        assert train(of=of, steps=2).guarantee.epsilon.upper < cost
    with pytest.raises(InvalidValue, match="ledger and directory were both passed"):
        train(of=of, steps=1, ledger=ledger, directory=tmp_path / "run")
    with pytest.raises(InvalidValue, match="must be a Ledger"):
        train(of=of, steps=1, ledger=3)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    train(steps=2, directory=tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")}
    model, optimizer, (inputs, targets) = problem()
    weights = [value.clone() for value in model.parameters()]
    others: list[tuple[Any, str]] = [
        ((inputs.flip(0), targets), "first 8 records differ"),
        ((inputs, (targets + 1) % 3), "first 8 records differ"),
        ((inputs.double(), targets), r"float32 \(4,\) -> int64 \(\), and the .* float64 \(4,\)"),
        ((inputs[:, :3], targets), r"float32 \(4,\) -> int64 \(\), and the .* float32 \(3,\)"),
        (TensorDataset(inputs + 1, targets), "first 8 records differ"),
    ]
    for data, message in others:
        with pytest.raises(CheckpointError, match=rf"{message}.*new run in a new directory"):
            train(of=(model, optimizer, data), steps=3, directory=tmp_path / "run", resume=True)
    assert all(map(torch.equal, weights, model.parameters()))
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").rglob("*.*")} == before
    same: Any = TensorDataset(inputs.clone(), targets.clone())
    repeated = train(of=(model, optimizer, same), steps=3, directory=tmp_path / "run", resume=True)
    assert repeated.steps == 3


def test_digests_of_records_are_in_the_secret_checkpoint_alone(tmp_path: Path) -> None:
    origins = []
    for name in ("one", "two"):
        train(steps=1, directory=tmp_path / name, randomness=randomness(1))
        path = tmp_path / name / "private" / "checkpoint.safetensors"
        assert path.stat().st_mode & 0o077 == 0
        origins.append(load(path)["origin"])
        public = [file.read_text() for file in (tmp_path / name).glob("*.[jt]*")]
        secrets = [origins[-1][each] for each in ("first", "seed") if origins[-1][each]]
        assert not [secret for secret in secrets for text in public if secret in text]
    assert origins[0]["first"] == origins[1]["first"] is not None


def test_another_seed_is_not_ignored_on_resuming(tmp_path: Path) -> None:
    train(steps=2, directory=tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"began with another seed, not with the seed 4: .*Leave the"
    ):
        train(steps=3, directory=tmp_path / "run", resume=True, randomness=randomness(4))
    train(steps=2, directory=tmp_path / "unseeded", randomness=hush.Randomness())
    with pytest.raises(CheckpointError, match=r"began with the operating system's randomness"):
        train(steps=3, directory=tmp_path / "unseeded", resume=True)
    used = seeded(1)
    torch.rand(3, generator=used)
    resumed = hush.Randomness(generator=used)
    assert train(steps=3, directory=tmp_path / "run", resume=True, randomness=resumed).steps == 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"directory": "run"}, r"Pass checkpoints=hush\.Checkpoints\(directory=\.\.\.\)"),
        ({"every": 3}, r"Pass logging=hush\.Logging\(every=\.\.\.\)"),
        ({"budgets": 3}, "no argument 'budgets'. Did you mean 'budget'"),
        ({"unit": 3}, "Did you mean 'units'"),
        ({"colour": 3}, "no argument 'colour'. Its arguments are on the page"),
    ],
)
def test_an_option_of_another_object_is_named_with_its_object(
    option: dict[str, Any], message: str
) -> None:
    model, optimizer, data = problem()
    loss = nn.CrossEntropyLoss()
    with pytest.raises(InvalidValue, match=message):
        hush.train(model, loss, optimizer, PLAN, data, budget=GENEROUS, steps=1, **option)


def test_settings_of_an_earlier_version_are_named_with_a_way_out(tmp_path: Path) -> None:
    settings = {"data": "digits", "adam": False}
    train(steps=1, directory=tmp_path / "run", settings=settings)
    del settings["adam"]
    with pytest.raises(CheckpointError, match=r"adam was False and is now not set.*delete it from"):
        train(steps=2, directory=tmp_path / "run", resume=True, settings=settings)
    (tmp_path / "run/settings.json").write_text('{"data": "digits"}')
    assert train(steps=2, directory=tmp_path / "run", resume=True, settings=settings).steps == 2


def test_mistakes_of_data_and_loss_are_named_before_a_charge(tmp_path: Path) -> None:
    """Each of them would otherwise end in an error of torch's that names neither."""
    model, optimizer, (inputs, targets) = problem()
    of = (model, optimizer, (inputs, targets))
    before = [value.clone() for value in model.parameters()]
    cannot, shape = "model cannot be evaluated .*", r"\(4,\) -> int64 \(\)"
    mistakes: list[tuple[Any, Any, str]] = [
        (of, (inputs.double(), targets), f"{cannot}float64 {shape}, .* float32 {shape}.*no step was"),
        (of, (inputs + 1, targets + 1), f"{cannot}Target 3 is out of bounds.*no step was charged"),
        (of, (inputs, targets), "evaluation is not"),
        (of, (inputs[:0], targets[:0]), "evaluation: the data has no records"),
        ((model, optimizer, (inputs, targets[:, None])), None, r"targets\.squeeze\(-1\)"),
        ((model, optimizer, ({"x": inputs}, targets)), None, r"forward\(\) takes \(input\)"),
    ]
    for problem_, evaluation, message in mistakes:
        with pytest.raises(DataError, match=message):
            train(of=problem_, steps=2, directory=tmp_path / "run", evaluation=evaluation)
    assert all(map(torch.equal, before, model.parameters()))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("relation", ["add/remove", hush.Neighbours.ADD_REMOVE])
def test_under_add_remove_the_length_of_the_data_is_never_the_divisor(relation: Any) -> None:
    """Whether the relation is passed as a name or as a value: the divisor would release the length."""
    with pytest.raises(InvalidValue, match="public estimate"):
        train(neighbours=relation, steps=1)
    assert train(neighbours=relation, records=51, steps=1).guarantee.records == 51


def test_a_ledger_is_passed_by_its_path(tmp_path: Path) -> None:
    """Training, a selection and a mean on one file add up, and the file is free in between."""
    file, budget = tmp_path / "ledger.jsonl", hush.Budget(epsilon=50.0, delta=1e-5)
    first, second = (train(steps=4, ledger=ledger) for ledger in (file, str(file)))
    assert first.guarantee.epsilon == hush.epsilon(PLAN, 4, 1e-5).epsilon
    assert second.guarantee.epsilon == hush.epsilon(PLAN, 8, 1e-5).epsilon
    counted = hush.plans.dpsgd(rate=1.0, multiplier=3.0)
    found = hush.mean(torch.rand(RECORDS, 2), counted, delta=1e-5, ledger=file)

    def fit(settings: Any, trial: TuningTrial) -> tuple[nn.Module, float]:
        model, optimizer, data = problem()
        options: Any = {"budget": trial.budget, "steps": trial.steps, "ledger": trial.ledger}
        helpers.train(model, trial.plan, data, optimizer=optimizer, **options)
        return model, 0.0

    space = {"rate": hush.Choice(0.1, 0.2)}
    tuned = hush.tune(fit, space, plan=PLAN, steps=2, budget=budget, mean=2.0, ledger=file)
    with hush.Ledger(file, read_only=True) as ledger:
        assert dict(ledger.counts) == {PLAN: 8, counted: 1, tuned.plan: 1}
        assert ledger.epsilon().epsilon == tuned.guarantee.epsilon
        assert found.guarantee.epsilon.upper < tuned.guarantee.epsilon.upper <= 50.0
