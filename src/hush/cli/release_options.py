"""Options of a selective run, and the release that they stand for."""

from typing import Annotated, Any

import typer

from hush.cli.options import one_of
from hush.core.errors import InvalidPlan, InvalidValue
from hush.core.parts import Always, Release
from hush.core.release import Selective

TestBatch = Annotated[
    int | None, typer.Option(help="Expected records in the test of each proposal: a selective run.")
]
TestNoise = Annotated[
    float | None, typer.Option(help="Noise of the test, in units of what a record can change.")
]
TestClip = Annotated[
    float | None, typer.Option(help="Largest change of the loss that counts: a record's, or the mean's.")
]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="Accept what is below this many test clips; -1, the paper's, by default; 0 tells best."
    ),
]
TestKind = Annotated[
    str | None,
    typer.Option(
        "--test",
        help="summed (by default) or mean, the DPSUR paper's.",
        callback=one_of("--test", "summed", "mean", why="its charge is proved for these two"),
    ),
]

# The summed test by default: docs/results/selective.md compares the two at equal epsilon.
_NOISE = {"summed": 8.0, "mean": 1.3}
_CLIP = {"summed": 0.01, "mean": 0.001}


def release_of(
    records: int,
    batch: int | None,
    noise: float | None,
    clip: float | None,
    threshold: float | None,
    test: str | None,
) -> Release:
    """The release these options stand for; without a test batch, every update is released."""
    kind: Any = test or "summed"
    if batch is None:
        given = {"noise": noise, "clip": clip, "threshold": threshold, "": test}
        for name, value in given.items():
            if value is not None:
                option = "--threshold" if name == "threshold" else f"--test{'-' * bool(name)}{name}"
                raise InvalidPlan(
                    f"{option} is for a test that is not there: no update would be tested. Pass "
                    "--test-batch as well."
                )
        return Always()
    if not 0 < batch <= records:
        raise InvalidValue(
            f"--test-batch {batch} must be > 0 and <= the {records} records: a record is tested with a "
            f"chance of at most 1. Pass e.g. --test-batch {min(256, records)}."
        )
    return Selective(
        rate=batch / records,
        clip=_CLIP.get(kind, 1.0) if clip is None else clip,
        multiplier=_NOISE.get(kind, 1.0) if noise is None else noise,
        threshold=-1.0 if threshold is None else threshold,
        test=kind,
    )
