"""`hush report`."""

from pathlib import Path

import pytest

from tests.cli.command import call


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    done = call("train", "--steps", "3", "--delta", "1e-4", "--run-dir", folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_is_reported_as_a_page(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = call("report", run, "--out", page, "--baseline", "0.97")
    assert done.returncode == 0, done.stderr
    assert str(page) in done.stdout
    assert "epsilon <= " in done.stdout
    assert "accuracy, 97.0% without privacy" in page.read_text()


def test_a_folder_of_runs_is_answered_with_its_runs(run: Path) -> None:
    refused = call("report", run.parent)
    assert refused.returncode == 2
    assert f"Pass a run's folder ({run}) or a ledger" in refused.stderr
