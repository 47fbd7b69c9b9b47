"""A recording is the same twice, and a comparison misses nothing."""

import math
from itertools import islice
from pathlib import Path

import pytest

import hush
from hush.core.parts import Clipping, Noise, Release, Sampling
from tests.unchanged.compare import differences, main
from tests.unchanged.entry import Entries
from tests.unchanged.plans import combinations, questions
from tests.unchanged.record import recorded, write

RUNS = ("mlp, Coordinate, Principal, BlockGaussian", "lstm, L1, Laplace")


def some() -> Entries:
    return recorded(questions(12), RUNS)


def test_a_recording_repeats_and_one_bit_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, flipped = (tmp_path / name for name in ("first", "second", "flipped"))
    recording = some()
    write(first, recording)
    write(second, some())
    assert first.read_bytes() == second.read_bytes()
    assert main(str(first), str(second)) == 0
    assert capsys.readouterr().out == f"{len(recording)} entries are equal, 0 differ\n"
    name = "plan 0: epsilon.epsilon.upper"
    write(flipped, recording | {name: math.nextafter(float.fromhex(recording[name]), math.inf).hex()})
    assert main(str(first), str(flipped)) == 1
    difference, total = capsys.readouterr().out.splitlines()
    assert difference.startswith(name)
    assert total == f"{len(recording) - 1} entries are equal, 1 differ"


def test_an_entry_that_is_gone_or_new_is_a_difference() -> None:
    assert differences({"a": "1", "b": "2"}, {"b": "2"}) == ["a: 1 -> (absent)"]
    assert differences({"b": "2"}, {"a": "1", "b": "2"}) == ["a: (absent) -> 1"]


def test_more_plans_are_the_same_plans_and_others() -> None:
    assert list(questions(12)) == list(islice(questions(20), 12))


def test_every_part_is_recorded() -> None:
    parts = {type(part) for _, plan in combinations() for part in vars(plan).values()}
    parts.add(hush.BestOf)  # of whole runs: no step is to be recorded
    for stage in (Sampling, Clipping, Noise, Release):
        assert parts >= {kind for kind in stage.kinds.values() if kind.__module__.startswith("hush.")}
