"""What depends on the records is asked for by name, and reaches no log, report or file otherwise."""

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hush
from hush.accounting.filters import RenyiFilter
from hush.training.methods.statistics import clipped_row_sum
from hush_recipes.bounded.linear import LinearDescent
from tests.training.helpers import plan_of, train

SOURCE = Path(hush.__file__).parent
NAMES = r"\b(individual_rdp|sampled_rdp|odometer|FisherLoss|charges)\("
MADE_HERE = {
    *("accounting/per_instance.py", "accounting/filters.py"),
    "training/per_instance.py",
}


def test_nothing_else_in_the_library_asks_for_them_or_prints_them() -> None:
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    asking = {path for path, text in texts.items() if re.search(NAMES, text) and "PATE" not in text}
    assert "accounting/per_instance.py" in asking, "the search finds what is there"
    assert asking <= MADE_HERE, "whoever prints, logs or stores must not compute per-instance numbers"
    for path in asking:
        code = re.sub(r'""".*?"""', "", texts[path], flags=re.DOTALL)
        assert not re.findall(r"\b(print|logging|logger|json|open|write_text|warn)\b", code), path


def test_a_run_leaves_none_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Train with every law, look at the per-instance number, and search everything that was left."""
    caplog.set_level(logging.DEBUG)
    x, y = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    plan = plan_of(clipping=hush.Linf(0.1), noise=hush.Rectified(scale=3.0, bound=1.0))
    model = nn.Linear(5, 2, bias=False)
    train(model, plan, (x, y), steps=2, evaluation=(x.clone(), y), directory=tmp_path / "run")
    descent = LinearDescent(x, y, plan, classes=2, lr=0.1, orders=[2.0])
    list(descent.run(steps=2))
    secret = descent.charges().for_all[0]
    own = float(hush.individual_rdp(plan, clipped_row_sum(x, plan).numpy(), [2.0])[0])
    assert hush.mean(x, plan, delta=1e-5).guarantee.sensitive is False
    out, err = capsys.readouterr()
    texts = [out, err, caplog.text, repr(descent), repr(descent.ledger)]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts += [path.read_bytes().decode("latin-1") for path in files]
    assert len(files) > 3, "the search is not idle"
    for text in texts:
        assert "per-instance" not in text
        assert f"{secret:.6g}" not in text
        assert f"{own:.6g}" not in text


def test_what_holds_them_does_not_show_them() -> None:
    guard = RenyiFilter(orders=[2.0], budget=[1.0])
    guard.admit(np.array([[0.123456]]))
    assert "0.123" not in repr(guard)
