"""`hush pate`: PATE, a student trained on noisy votes of teachers."""

import math
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hush.cli.options import (
    AsJson,
    Data,
    DataDir,
    Delta,
    Model,
    Quiet,
    Resume,
    Seed,
    UnitsFile,
    refuse_together,
)
from hush.cli.output import SEED_NOTICE, print_json
from hush.core.errors import DataError, InvalidValue
from hush.core.guarantee import DELTA, Budget
from hush.core.parts import Noise
from hush.noise import Gaussian, GeneralizedGaussian, Laplace


def pate(
    data: Data = "digits",
    data_dir: DataDir = None,
    model: Model = None,
    teachers: Annotated[int, typer.Option(help="Teachers, each with records of its own.")] = 100,
    queries: Annotated[
        int, typer.Option(help="Public inputs to ask about: the first of the test records.")
    ] = 200,
    answers: Annotated[
        int | None, typer.Option(help="The most that are answered; all by default.")
    ] = None,
    units: UnitsFile = None,
    epsilon: Annotated[
        float | None, typer.Option(help="The epsilon that is not exceeded; 8 by default.")
    ] = None,
    delta: Delta = 1e-5,
    noise: Annotated[
        float | None, typer.Option(help="Noise multiplier on a count, in place of --epsilon.")
    ] = None,
    beta: Annotated[
        float, typer.Option(help="Shape of the noise: 1 Laplace, 2 Gaussian, others between and above.")
    ] = 2.0,
    threshold: Annotated[
        float | None, typer.Option(help="Answer only where this many teachers, with noise, agree.")
    ] = None,
    test_noise: Annotated[
        float | None, typer.Option(help="Noise of that test, in units of the noise on a count; else 3.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes of a network over its records.")] = 40,
    learning_rate: Annotated[float, typer.Option("--lr", help="Learning rate of Adam.")] = 5e-3,
    processes: Annotated[int, typer.Option(help="Teachers trained at once.")] = 1,
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/pate"),
    resume: Resume = False,
    seed: Seed = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train teachers on disjoint private records, and a student on their noisy votes (PATE).

    Without --noise, the noise is chosen so that all queries fit the budget.

    Example: hush pate --teachers 100 --queries 200 --epsilon 8
    """
    import torch

    from hush.data import load, read_owners, tensors
    from hush.models import build, default_model
    from hush.pate.argmax import NoisyMax
    from hush.pate.confident import Confident, Query, with_noise
    from hush.pate.run import pate as run_pate
    from hush.pate.teachers import Lesson
    from hush.training.progress import Progress

    DELTA["range"].check("delta", delta)
    dataset = load(data, data_dir)
    owners = None if units is None else read_owners(units, len(dataset.y_train))
    x_train, y_train, x_test, y_test = tensors(dataset)
    if not 0 < queries < len(x_test):
        raise DataError(
            f"--queries {queries} must be > 0 and below the {len(x_test)} test records: they serve as "
            f"public inputs, and the student is measured on the rest. Pass e.g. --queries "
            f"{len(x_test) // 2}."
        )
    vote = NoisyMax.of_teachers(noise=_noise(beta, 1.0 if noise is None else noise))
    query: Query = vote
    if threshold is None and test_noise is not None:
        raise InvalidValue(
            f"--test-noise {test_noise:g} is the noise of a test, and without --threshold there is "
            "none. Pass both, or neither."
        )
    if threshold is not None:
        multiplier = (3.0 if test_noise is None else test_noise) * vote.noise.to_plain()["multiplier"]
        query = Confident(vote=vote, threshold=threshold, noise=_noise(beta, multiplier))
    refuse_together(noise=noise, epsilon=epsilon)
    if noise is None:
        budget = Budget(epsilon=8.0 if epsilon is None else epsilon, delta=delta)
        query = with_noise(query, budget, queries, queries if answers is None else answers)
    with Progress("training teachers", teachers, unit="teachers", visible=not quiet) as progress:
        run = run_pate(
            partial(
                build,
                model or ("mlp" if data == "digits" else default_model(data)),
                classes=dataset.classes,
                shape=dataset.shape,
                dtype=x_train.dtype,
            ),
            (x_train, y_train),
            (x_test[:queries], y_test[:queries]),
            (x_test[queries:], y_test[queries:]),
            query=query,
            teachers=teachers,
            classes=dataset.classes,
            delta=delta,
            directory=run_dir,
            answers=answers,
            units=owners,
            lesson=Lesson(epochs=epochs, rate=learning_rate),
            processes=processes,
            resume=resume,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            done=progress.advance,
        )
    if as_json:
        print_json(
            {
                "guarantee": run.guarantee.to_plain(),
                "queries": queries,
                "answered": run.answered,
                "label_accuracy": run.label_accuracy,
                "student_accuracy": run.student_accuracy,
                "query": query.to_plain(),
                "seeded": seed is not None,
                "directory": str(run_dir),
                "sensitive": {
                    "teacher_accuracy": run.teacher_accuracy,
                    "per_instance": run.per_instance.to_plain() if run.per_instance else None,
                },
            }
        )
        return
    accuracy = "none to measure" if math.isnan(run.label_accuracy) else f"{run.label_accuracy:.1%} right"
    print(f"{data}: {run.answered} of {queries} queries answered, {accuracy}")
    print(f"student: accuracy {run.student_accuracy:.2%} on {len(x_test) - queries} test records")
    print(run.guarantee)
    print("sensitive, computed from the private records (in no file to publish):")
    print(f"  teachers: {run.teacher_accuracy:.2%} of their votes right")
    if run.per_instance:
        print(f"  on these votes: {run.per_instance}")
    if seed is not None:
        print(SEED_NOTICE)
    print(f"to publish: {run_dir / 'student.safetensors'} and the ledger beside it; not teachers/")


def _noise(beta: float, multiplier: float) -> Noise:
    if beta == 1:
        return Laplace(multiplier=multiplier)
    if beta == 2:
        return Gaussian(multiplier=multiplier)
    return GeneralizedGaussian(beta=beta, multiplier=multiplier)
