"""The scripts of docs/distributed.md, each run by two gloo processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hush
from hush.core.errors import Unsupported
from tests.training.distributed import launched
from tests.training.distributed.problems import step_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "distributed.md"
_BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
SCRIPTS = {text.split()[1]: text for text in _BLOCKS}
"""Text of each script of the page by its name, which its first line says."""
CHARGE = "epsilon <= 1.1489"
"""Of twenty steps of the page's plan by one process."""
LEDGERS = {
    "train.py": "runs/digits/ledger.jsonl",
    "accelerate_train.py": "ledger.jsonl",
    "lightning_train.py": "ledger.jsonl",
    "trainer_train.py": "digits/ledger.jsonl",
    "sharded_train.py": "ledger.jsonl",
}


def printed_by(script: Path, rank: int) -> str:
    path = script.parent / f"{rank}.out"
    return path.read_text() if path.exists() else ""


def steps_charged(folder: Path, script: str) -> int:
    with hush.Ledger(folder / LEDGERS[script]) as ledger:
        return sum(ledger.counts.values())


def test_the_charge_that_is_looked_for_is_that_of_one_process() -> None:
    plan = hush.Plan(sampling=hush.Poisson(0.25), clipping=hush.L2(1.0), noise=hush.Gaussian(4.0))
    assert str(hush.epsilon(plan, steps=20, delta=1e-5)).startswith(CHARGE)
    assert SCRIPTS.keys() == LEDGERS.keys()


@pytest.mark.slow
def test_a_script_of_the_page_is_one_run_of_two_processes(tmp_path: Path) -> None:
    """All of them in one test: they share the imports."""
    scripts = [tmp_path / name.removesuffix(".py") / name for name in SCRIPTS]
    for script, text in zip(scripts, SCRIPTS.values(), strict=True):
        script.parent.mkdir()
        script.write_text(text)
    launcher = [sys.executable, "-m", launched.__name__]
    done = subprocess.run([*launcher, *scripts], cwd=ROOT, capture_output=True, text=True)
    printed = {
        script.name: [printed_by(script, rank) for rank in range(launched.RANKS)] for script in scripts
    }
    assert done.returncode == 0, (done.stderr, printed)
    for script in scripts:
        first, second = printed[script.name]
        assert CHARGE in first, script
        assert "epsilon" not in second, script
        assert steps_charged(script.parent, script.name) == 20, script


@pytest.mark.slow
def test_lightning_starts_its_second_process_itself(tmp_path: Path) -> None:
    (tmp_path / "lightning_train.py").write_text(SCRIPTS["lightning_train.py"])
    command = [sys.executable, "lightning_train.py"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    own = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(CHARGE) == 1
    assert "MEMBER: 2/2" in done.stderr
    assert steps_charged(tmp_path, "lightning_train.py") == 20


BERT = """
import torch
from pathlib import Path
from tests.integrations.test_transformers import trainer, weights

options = {"per_device_train_batch_size": 8, "bf16": True, "gradient_checkpointing": True}
run = trainer(Path("bert"), epsilon=8.0, args=options)
run.train()
print(run.private_step.steps, run.private_step.reducer.size, weights(run.model).double().sum().item())
print(run.spent())
"""


@pytest.mark.slow
def test_a_transformer_trains_in_bf16_with_gradient_checkpointing_on_two_processes(
    tmp_path: Path,
) -> None:
    script = tmp_path / "bert.py"
    script.write_text(BERT)
    done = subprocess.run(
        [sys.executable, "-m", launched.__name__, script], cwd=ROOT, capture_output=True, text=True
    )
    printed = [printed_by(script, rank).splitlines()[-2:] for rank in range(launched.RANKS)]
    assert done.returncode == 0, (done.stderr, printed)
    assert printed[0] == printed[1]  # the same weights on both ranks
    assert printed[0][0].startswith("8 2 ")
    assert printed[0][1].startswith("epsilon <= 7.99")


def test_processes_that_have_not_met_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert step_of().reducer.processes is False
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(Unsupported, match="WORLD_SIZE=8: a launcher started 8 processes"):
        step_of()
    assert step_of(distributed=hush.Distributed(processes=False)).reducer.processes is False
    monkeypatch.delenv("RANK")
    assert step_of().reducer.processes is False
