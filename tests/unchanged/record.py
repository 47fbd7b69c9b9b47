"""Every number that a reorganisation must not move, to the last bit, in one file.

Run, before and after, on the same machine with the same versions of torch, numpy and scipy:

    OMP_NUM_THREADS=1 python -m tests.unchanged.record before.json
    OMP_NUM_THREADS=1 python -m tests.unchanged.record after.json
    python -m tests.unchanged.compare before.json after.json
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.unchanged.entry import Entries
from tests.unchanged.numbers import answers, combined
from tests.unchanged.plans import Question, combinations, questions
from tests.unchanged.runs import RUNS, run
from tests.unchanged.studies import studies

PLANS = 500


def recorded(plans: Iterable[Question], runs: Iterable[str]) -> Entries:
    """The entries of some plans and some runs."""
    found: Entries = {}
    for question in plans:
        found |= answers(question)
    for name in runs:
        found |= run(name)
    return found


def everything() -> Entries:
    """All entries there are."""
    found = recorded(questions(PLANS), RUNS) | studies()
    for name, plan in combinations():
        found |= combined(name, plan)
    return found


def write(path: Path, found: Entries) -> None:
    """One entry a line, so that a text comparison of two files is readable too."""
    path.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def main() -> None:
    (out,) = sys.argv[1:]
    found = everything()
    write(Path(out), found)
    refused = sum(text.startswith("refused") for text in found.values())
    print(f"{len(found)} entries, {refused} of them refusals, in {out}")


if __name__ == "__main__":
    main()
