"""The path of one batch in docs/design.md."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import hush

_PAGE = Path(__file__).parent.parent / "docs" / "design.md"


def files_of_one_step() -> set[str]:
    """Files of the package with a function that one step calls."""
    model = nn.Linear(8, 2)
    plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=64)
    batches = step.batches((torch.randn(64, 8), torch.randint(0, 2, (64,))))
    step(next(batches))
    root, found = f"{Path(hush.__file__).parent}/", set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found.add(frame.f_code.co_filename.removeprefix(root))

    batch, before = next(batches), sys.getprofile()
    sys.setprofile(profile)
    step(batch)
    sys.setprofile(before)
    return found


def test_the_page_lists_each_file_of_a_step() -> None:
    section = _PAGE.read_text().partition("## The path of one batch")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`([a-z_/]+\.py)`", section))
    files = files_of_one_step()
    assert files <= listed
    assert len(files) <= 22
    # a batch is drawn before the step; a model with other layers or a selective plan takes these
    assert listed - files == {"sampling.py", "gradients/recording.py", "training/methods/selective.py"}
