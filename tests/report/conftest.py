"""A ledger of two plans, and the facts of its report."""

from pathlib import Path

import pytest

import hush
from hush.report.facts import RunFacts, run_facts

STATISTICS = hush.plans.dpsgd(rate=1.0, clip_norm=1.0, multiplier=8.0)
TRAINING = hush.plans.dpsgd(rate=0.2, clip_norm=1.0, multiplier=3.0)


def charge(path: Path, *charges: tuple[hush.Plan, int]) -> Path:
    """A ledger with charges, in this order."""
    with hush.Ledger(path) as ledger:
        for number, (plan, steps) in enumerate(charges):
            for step in range(1, steps + 1):
                ledger.charge(plan, run=f"run-{number}", step=step, release=f"{step}", records=1000)
        ledger.store_delta(1e-5)
    return path


@pytest.fixture(scope="session")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases of statistics and 30 training steps."""
    folder = tmp_path_factory.mktemp("runs") / "whitened"
    folder.mkdir()
    return charge(folder / "ledger.jsonl", (STATISTICS, 2), (TRAINING, 30))


@pytest.fixture(scope="session")
def facts(ledger: Path) -> RunFacts:
    """Of that ledger."""
    return run_facts(ledger)
