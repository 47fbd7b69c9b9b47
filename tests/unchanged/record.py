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
    recording: Entries = {}
    for question in plans:
        recording |= answers(question)
    for name in runs:
        recording |= run(name)
    return recording


def everything() -> Entries:
    """All entries there are."""
    recording = recorded(questions(PLANS), RUNS) | studies()
    for name, plan in combinations():
        recording |= combined(name, plan)
    return recording


def write(path: Path, recording: Entries) -> None:
    """One entry a line, so that a text comparison of two files is readable too."""
    path.write_text(json.dumps(recording, indent=0, sort_keys=True) + "\n")


def main() -> None:
    (out,) = sys.argv[1:]
    recording = everything()
    write(Path(out), recording)
    refused = sum(text.startswith("refused") for text in recording.values())
    print(f"{len(recording)} entries, {refused} of them refusals, in {out}")


if __name__ == "__main__":
    main()
