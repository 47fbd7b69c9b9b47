from pathlib import Path

import pytest

import hush
from hush.core.errors import CheckpointError, InvalidPlan
from hush.core.plan_file import read_plan
from hush.training.folder import RunFolder

PLAN = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
)


def test_it_keeps_its_plan_and_refuses_another(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run", PLAN, resume=False)
    hush.Ledger(folder.ledger).close()
    folder.begin(PLAN)
    assert read_plan(tmp_path / "a" / "run" / "plan.toml") == PLAN
    RunFolder(tmp_path / "a" / "run", PLAN, resume=True)
    with pytest.raises(CheckpointError, match="already holds a run"):
        RunFolder(tmp_path / "a" / "run", PLAN, resume=False)
    other = hush.Plan(sampling=PLAN.sampling, clipping=hush.L2(norm=2.0), noise=PLAN.noise)
    with pytest.raises(InvalidPlan, match="another plan"):
        RunFolder(tmp_path / "a" / "run", other, resume=True)


def test_metrics_after_the_checkpoint_are_dropped_and_torn_lines_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, PLAN, resume=True)
    assert folder.metrics() == []
    for step in (5, 10, 15):
        folder.add_metrics({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    assert folder.metrics(up_to=10) == [{"step": 5}, {"step": 10}]
    folder.add_metrics({"step": 15})
    assert folder.metrics() == [{"step": 5}, {"step": 10}, {"step": 15}]
