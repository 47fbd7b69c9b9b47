import errno
import os
from pathlib import Path

import pytest

import hush
from hush.core.errors import CheckpointError, InvalidPlan, LedgerError
from hush.core.plan import read_plan, write_plan
from hush.training import checkpoint
from hush.training.run_folder import RunFolder, read_metrics

PLAN = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))


def test_it_keeps_its_plan_and_refuses_another(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run", PLAN, resume=False)
    with hush.Ledger(folder.ledger) as ledger:
        folder.begin(PLAN, ledger)
    assert read_plan(tmp_path / "a" / "run" / "plan.toml") == PLAN
    RunFolder(tmp_path / "a" / "run", PLAN, resume=True)
    with pytest.raises(
        CheckpointError, match=r"already holds a run.*Resume it \(--resume\), or .*\(--run-dir\)"
    ):
        RunFolder(tmp_path / "a" / "run", PLAN, resume=False)
    other = hush.Plan(sampling=PLAN.sampling, clipping=hush.L2(2.0), noise=PLAN.noise)
    with pytest.raises(
        InvalidPlan, match=r"differs from the current plan .*clipping\.norm was 1\.0 and is now 2\.0"
    ):
        RunFolder(tmp_path / "a" / "run", other, resume=True)


def test_metrics_after_the_checkpoint_are_dropped_and_torn_lines_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, PLAN, resume=True)
    assert folder.metrics(up_to=10) == []
    for step in (5, 10, 15):
        folder.add_metrics({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:  # cut short by a crash
        file.write('{"step": 2')
    assert folder.metrics(up_to=10) == [{"step": 5}, {"step": 10}]
    folder.add_metrics({"step": 15})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 5}, {"step": 10}, {"step": 15}]


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_with_the_file_it_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path, PLAN, resume=True)
    with hush.Ledger(folder.ledger) as ledger:
        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match=r"No space left.*unchanged.*resume.*anchor\.json"):
            folder.begin(PLAN, ledger)
        with pytest.raises(OSError, match=r"No space left.*plan\.toml"):
            write_plan(PLAN, tmp_path / "plan.toml")
        with pytest.raises(OSError, match=r"No space left.*checkpoint\.safetensors"):
            checkpoint.save(folder.checkpoint, {"numbers": [1, 2]})
        with pytest.raises(LedgerError, match=r"ledger\.jsonl.*No space left"):
            ledger.charge(PLAN, run="r", step=1, release="a")
    monkeypatch.undo()
    monkeypatch.setattr(Path, "open", full_disk)
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        folder.add_metrics({"step": 1})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["ledger.jsonl"]


def test_a_run_refused_before_it_began_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "a/run", PLAN, resume=False)

    def refused() -> None:
        with hush.Ledger(folder.ledger) as ledger, folder.cleanup_on_failure():
            folder.begin(PLAN, ledger)

    monkeypatch.setattr("hush.training.run_folder.write_plan", full_disk)  # the anchor is there already
    with pytest.raises(OSError, match="No space"):
        refused()
    assert not list(tmp_path.iterdir())
