"""Files and functions of hush that one batch of a linear model passes through, in its second step.

Run: .venv/bin/python benchmarks/hops.py [--list]
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

import hush

HUSH = Path(hush.__file__).parent
Function = tuple[str, str, int]


def visited(work: Callable[[], object]) -> set[Function]:
    """File, name and first line of every function of hush that is entered while `work` runs."""
    functions: set[Function] = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # comprehensions and lambdas belong to the function that they are written in
        named = event == "call" and not code.co_name.startswith("<")
        if named and Path(code.co_filename).is_relative_to(HUSH):
            functions.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    sys.setprofile(enter)
    try:
        work()
    finally:
        sys.setprofile(None)
    return functions


def main() -> None:
    torch.manual_seed(0)
    model, drawn = torch.nn.Linear(8, 2), torch.Generator().manual_seed(0)
    plan = hush.Plan(
        sampling=hush.Poisson(rate=0.5),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=1.0),
    )
    loss, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, loss, optimizer, plan, records=64, generator=drawn)
    batches = step.batches((torch.randn(64, 8), torch.randint(0, 2, (64,))))
    step(next(batches))
    functions = visited(lambda: step(next(batches)))
    if "--list" in sys.argv:
        for file, name, line in sorted(functions):
            print(f"{Path(file).relative_to(HUSH)}:{line} {name}")
    print(f"{len({file for file, *_ in functions})} files, {len(functions)} functions")


if __name__ == "__main__":
    main()
