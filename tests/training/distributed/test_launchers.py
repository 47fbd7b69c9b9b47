"""The scripts of docs/distributed.md, each run by two gloo processes."""

import multiprocessing
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import hush
from hush.core.errors import Unsupported
from hush.training.distributed.group import process_group
from tests.training.distributed.problems import step_of

PAGE = Path(__file__).parents[3] / "docs" / "distributed.md"
_BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
SCRIPTS = {text.split()[1]: text for text in _BLOCKS}
"""Text of each script of the page by its name, which its first line says."""
CHARGE = "epsilon <= 1.1489"
"""Of twenty steps of the page's plan by one process."""
LEDGERS = {
    "train.py": "runs/digits/ledger.jsonl",
    "accelerate_train.py": "ledger.jsonl",
    "lightning_train.py": "ledger.jsonl",
}
PRELOADED = ["hush.training.step", "hush.data", "accelerate", "lightning.pytorch"]
WRAPPED = """
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from hush.core.errors import Unsupported
from tests.training.distributed.problems import data_of, model_of, seeded, step_of, weights_of

accelerator = Accelerator()
assert accelerator.num_processes == 2

def trained(model, optimizer):
    step = step_of(model, optimizer=optimizer, generator=seeded())
    for batch in step.batches(data_of(), steps=3):
        step(batch)
    return weights_of(model)

model = model_of()
plain = trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
model = model_of()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
prepared, optimizer = accelerator.prepare(model, optimizer)
try:
    step_of(prepared, optimizer=optimizer)
except Unsupported as error:
    print(error)
assert torch.equal(plain, trained(accelerator.unwrap_model(prepared), optimizer))
print("the same weights")
scaler = torch.amp.GradScaler("cpu")
strategy = SingleDeviceStrategy("cpu", precision_plugin=MixedPrecision("16-mixed", "cpu", scaler))
plain = torch.optim.SGD(model.parameters(), lr=0.1)
for wrapped in (
    AcceleratedOptimizer(plain, scaler=scaler),
    LightningOptimizer._to_lightning_optimizer(plain, strategy),
):
    try:
        step_of(model, optimizer=wrapped)
    except Unsupported as error:
        print(error)
accelerator.end_training()
"""


def run_rank(script: str, folder: str, rank: int, ranks: int, port: int) -> None:
    """Run a script as torchrun starts one of its processes; what it prints goes to a file."""
    os.chdir(folder)
    printed = os.open(f"{rank}.out", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    numbers |= {"GROUP_RANK": 0, "MASTER_PORT": port}
    os.environ |= {name: str(number) for name, number in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none", "ACCELERATE_USE_CPU": "1"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def run(folder: Path, name: str, text: str, ranks: int = 2) -> list[str]:
    """What each rank of a script printed, after all have ended well."""
    (folder / name).write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # forked after the imports, which take longer than the scripts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    workers = [
        context.Process(target=run_rank, args=(name, str(folder), rank, ranks, port))
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        worker.kill()
    printed = [(folder / f"{rank}.out").read_text() for rank in range(ranks)]
    assert [worker.exitcode for worker in workers] == [0] * ranks, "\n".join(printed)
    return printed


def steps_charged(folder: Path, script: str) -> int:
    with hush.Ledger(folder / LEDGERS[script]) as ledger:
        return sum(ledger.counts.values())


def test_the_charge_that_is_looked_for_is_that_of_one_process() -> None:
    plan = hush.Plan(
        sampling=hush.Poisson(rate=0.25), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=4.0)
    )
    assert str(hush.epsilon(plan, steps=20, delta=1e-5)).startswith(CHARGE)
    assert SCRIPTS.keys() == LEDGERS.keys()


def test_a_script_of_the_page_is_one_run_of_two_processes(tmp_path: Path) -> None:
    """All of them in one test: they share the imports."""
    for script, text in SCRIPTS.items():
        folder = tmp_path / script.removesuffix(".py")
        folder.mkdir()
        first, second = run(folder, script, text)
        assert CHARGE in first, script
        assert "epsilon" not in second, script
        assert steps_charged(folder, script) == 20, script
    for printed in run(tmp_path, "wrapped.py", WRAPPED):
        assert "is wrapped in DistributedDataParallel" in printed
        assert "the same weights" in printed
        assert "is an AcceleratedOptimizer with a gradient scaler" in printed
        assert "is a LightningSGD with a gradient scaler" in printed


@pytest.mark.slow
@pytest.mark.parametrize("script", LEDGERS)
def test_the_command_of_the_page_goes_on_where_it_stopped(script: str, tmp_path: Path) -> None:
    """Half of the steps, then the page's script, then nothing: the steps are charged once."""
    (command,) = re.findall(
        rf"^    (.*\b{script}) .*two processes on a CPU$", PAGE.read_text(), re.MULTILINE
    )
    text = SCRIPTS[script]
    half = text.replace("steps=20", "steps=10").replace("max_epochs=2", "max_epochs=1")
    assert half != text
    scripts = {10: half, 20: text}
    for steps in (10, 20, 20):
        (tmp_path / script).write_text(scripts[steps])
        done = subprocess.run(
            ["env", *shlex.split(command)],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert steps_charged(tmp_path, script) == steps


def test_processes_that_have_not_met_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert process_group(None) is None
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(Unsupported, match="WORLD_SIZE=8: a launcher started 8 processes"):
        step_of()
    assert step_of(processes=False).processes is None
    monkeypatch.delenv("RANK")
    assert process_group(None) is None
