"""`hush report` and `hush pate`: the privacy report of a run, and PATE."""

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hush.accounting.planning import deviation
from hush.cli import options as opt
from hush.cli.experiment import folder_of
from hush.cli.output import print_run
from hush.core.atomic_files import check_folder
from hush.core.errors import DataError, InvalidValue
from hush.core.guarantee import DEFAULT_DELTA, DELTA, Budget
from hush.core.parts import Noise
from hush.noise import Gaussian, GeneralizedGaussian, Laplace

if TYPE_CHECKING:
    from hush.pate.argmax import Query

_reporting = partial(opt.about, panel="Report")
_voting = partial(opt.about, panel="Teachers and votes")


def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run, or a ledger.")],
    out: Annotated[Path | None, _reporting("HTML file; report.html by default.")] = None,
    delta: opt.ReportedDelta = None,
    baseline: Annotated[float | None, _reporting("Accuracy without privacy, e.g. 0.95.")] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Write the privacy report of a run: guarantee, risks and assumptions, as one HTML page.

    Example: hush report runs/digits-1
    """
    from hush.report.facts import run_facts
    from hush.report.page import write_report
    from hush.training.progress import Progress

    if out is not None and out.suffix not in (".html", ".htm"):
        raise InvalidValue(f"--out {out} must end in .html: the report is a page.", key="out")
    page = (run_dir if run_dir.is_dir() else run_dir.parent) / "report.html" if out is None else out
    if run_dir.exists():
        check_folder("--out", page.parent)
    with Progress("computing the curves", visible=not quiet):
        facts = run_facts(run_dir, delta=delta, baseline=baseline)
    write_report(page, facts)
    print(facts.guarantee)
    print(f"report: {page}")


def pate(
    data: opt.Data = "digits",
    data_dir: opt.DataDir = None,
    model: opt.Model = None,
    teachers: Annotated[int, _voting("Number of teachers, trained on disjoint records.")] = 100,
    queries: Annotated[int, _voting("Number of public queries (the first test records).")] = 200,
    answers: Annotated[int | None, _voting("Maximum number of answers; all by default.")] = None,
    units: opt.UnitsFile = None,
    epsilon: Annotated[float | None, opt.privacy("Privacy budget: epsilon; 8 by default.")] = None,
    delta: opt.Delta = DEFAULT_DELTA,
    noise: Annotated[float | None, opt.privacy("Noise multiplier, instead of --epsilon.")] = None,
    beta: Annotated[float, opt.privacy("Exponent of the noise: 1 is Laplace, 2 is Gaussian.")] = 2.0,
    threshold: Annotated[float | None, _voting("Votes needed for an answer, with noise.")] = None,
    test_noise: Annotated[
        float | None, _voting("Noise of --threshold / noise of a vote; default 3.")
    ] = None,
    epochs: Annotated[int, opt.training("Epochs for each network.")] = 40,
    learning_rate: Annotated[float, opt.training("Learning rate of Adam.", "--lr")] = 5e-3,
    processes: Annotated[int, opt.training("Number of processes that train teachers.")] = 1,
    run_dir: opt.RunDir = None,
    resume: opt.Resume = False,
    seed: opt.Seed = None,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train teachers on disjoint private records and a student on their noisy votes (PATE).

    Without --noise, hush calibrates the noise so that all queries fit the budget. Queries and test
    records are public.

    Example: hush pate --teachers 100 --queries 200 --epsilon 8

    Answer only confident queries: hush pate --threshold 60 --queries 200 --epsilon 8
    """
    import torch

    from hush.data import load, read_owners, tensors
    from hush.models import build, default_model
    from hush.pate.argmax import Confident, NoisyMax, with_noise
    from hush.pate.run import pate as run_pate
    from hush.pate.teachers import Lesson
    from hush.training.progress import Progress

    if resume and run_dir is None:
        raise InvalidValue("--resume continues the run of a folder. Pass it as --run-dir.")
    folder = folder_of(run_dir, "pate")
    DELTA["range"].check("delta", delta)
    dataset = load(data, data_dir)
    owners = None if units is None else read_owners(units, len(dataset.y_train))
    x_train, y_train, x_test, y_test = tensors(dataset)
    if not 0 < queries < len(x_test):
        raise DataError(
            f"--queries {queries} must be > 0 and below the {len(x_test)} test records: the student is "
            f"evaluated on the other records. Pass e.g. --queries {len(x_test) // 2}."
        )
    vote = NoisyMax.of_teachers(noise=_noise(beta, 1.0 if noise is None else noise))
    query: Query = vote
    if threshold is None and test_noise is not None:
        text = f"--test-noise {test_noise:g} needs --threshold: without it, no query is tested. Pass "
        raise InvalidValue(f"{text}both, or neither.")
    if threshold is not None:
        multiplier = (3.0 if test_noise is None else test_noise) * vote.noise.to_plain()["multiplier"]
        query = Confident(vote=vote, threshold=threshold, noise=_noise(beta, multiplier))
    opt.reject_together(noise=noise, epsilon=epsilon)
    if noise is None:
        budget = Budget(epsilon=8.0 if epsilon is None else epsilon, delta=delta)
        query = with_noise(query, budget, queries, queries if answers is None else answers)
    shape, kind, classes = dataset.shape, x_train.dtype, dataset.classes
    chosen = model or ("mlp" if data == "digits" else default_model(data))
    network = partial(build, chosen, classes=classes, shape=shape, dtype=kind)
    with Progress("training teachers", teachers, unit="teachers", visible=not quiet) as progress:
        tests = (x_test[:queries], y_test[:queries]), (x_test[queries:], y_test[queries:])
        run = run_pate(
            *(network, (x_train, y_train), *tests),
            query=query,
            teachers=teachers,
            classes=classes,
            delta=delta,
            directory=folder,
            answers=answers,
            units=owners,
            lesson=Lesson(epochs=epochs, rate=learning_rate),
            processes=processes,
            resume=resume,
            generator=None if seed is None else torch.Generator().manual_seed(seed),
            done=progress.advance,
        )
    accuracy = "no labels" if math.isnan(run.label_accuracy) else f"{run.label_accuracy:.1%} right"
    law = query.vote.noise.exponential_power(1.0)
    spread = 0.0 if law is None else deviation(*law)
    hint = "; fewer --queries, more --teachers or a larger --epsilon give better answers"
    lines = [
        f"{data}: {run.answered} of {queries} queries answered, {accuracy}",
        f"student: accuracy {run.student_accuracy:.2%} on {len(x_test) - queries} test records",
        f"noise: standard deviation {spread:.3g} on each count of the votes of {teachers} teachers"
        f"{hint * (spread > teachers / 6)}",
        str(run.guarantee),
        f"to publish: {folder / 'student.safetensors'} and the ledger beside it; not teachers/",
        "sensitive, computed from the private records (not in a published file):",
        f"  teachers: {run.teacher_accuracy:.2%} of their votes right",
    ]
    if run.per_instance:
        lines.append(f"  on these votes: {run.per_instance}")
    instance = run.per_instance and run.per_instance.to_plain()
    facts = {"queries": queries, "answered": run.answered, "query": query.to_plain()}
    facts |= {"label_accuracy": run.label_accuracy, "student_accuracy": run.student_accuracy}
    facts["sensitive"] = {"teacher_accuracy": run.teacher_accuracy, "per_instance": instance}
    print_run(run.guarantee, facts, lines, seed=seed, folder=folder, as_json=as_json)


def _noise(beta: float, multiplier: float) -> Noise:
    if beta in (1, 2):
        return (Laplace if beta == 1 else Gaussian)(multiplier=multiplier)
    return GeneralizedGaussian(beta=beta, multiplier=multiplier)
