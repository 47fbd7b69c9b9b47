"""`hush train`: a private run from names and numbers."""

import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Annotated, cast

import typer

from hush.cli.experiment import MOMENTUM, RATE, Experiment, Settings
from hush.cli.options import (
    AsJson,
    BatchSize,
    Data,
    Delta,
    Device,
    Epochs,
    Epsilon,
    Model,
    Noise,
    PlanFile,
    Rate,
    Seed,
    Steps,
    device_of,
    one_of,
    plan_of,
    refuse_together,
    sampling_of,
    steps_of,
)
from hush.cli.output import print_json
from hush.cli.release_options import TestBatch, TestClip, TestKind, TestNoise, Threshold, release_of
from hush.cli.resume import check_plan_kept
from hush.core.errors import InvalidValue
from hush.core.guarantee import Arithmetic, Budget
from hush.core.plan import read_plan
from hush.core.ranges import Range
from hush.data.features import FEATURES

_VIEWS = Range(
    at_least=1,
    at_most=1024,
    why="each is a pass over the record, which has one clipped gradient however many there are",
    example=4,
)

_MODELS = {
    "digits": "logistic",
    "mnist": "mnist-cnn",
    "fashion-mnist": "mnist-cnn",
    "cifar10": "cifar-cnn",
    "adult": "mlp",
    "imdb": "imdb-lstm",
}


def train(
    data: Data = "digits",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the data files; else HUSH_DATA.")
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            help=f"Features of images, worked out once: {', '.join(FEATURES)}.",
            callback=one_of("--features", *FEATURES, why="they are worked out by that name"),
        ),
    ] = None,
    model: Model = None,
    epsilon: Epsilon = 3.0,
    delta: Delta = 1e-5,
    noise: Noise = None,
    rate: Rate = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    epochs: Epochs = None,
    clip: Annotated[
        float | None, typer.Option(help="Largest Euclidean norm of a gradient; 1 by default.")
    ] = None,
    test_batch: TestBatch = None,
    test_noise: TestNoise = None,
    test_clip: TestClip = None,
    threshold: Threshold = None,
    test: TestKind = None,
    plan: PlanFile = None,
    learning_rate: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 1.0,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD.")] = None,
    adam: Annotated[bool | None, typer.Option("--adam", help="Adam instead of SGD.")] = None,
    physical_batch: Annotated[
        int | None, typer.Option(help="Records in memory at once; changes no result.")
    ] = None,
    views: Annotated[
        int | None, typer.Option(help="Flipped and shifted views of an image, averaged before clipping.")
    ] = None,
    public_records: Annotated[
        int | None,
        typer.Option(help="Training records given up as public ones, for plans with public bases."),
    ] = None,
    device: Device = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run; a new one below runs by default.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on where the run in --run-dir stopped.")] = False,
    reseed: Annotated[
        bool, typer.Option(help="Resume with new randomness, charging repeated steps again.")
    ] = False,
    seed: Seed = None,
    secure: Annotated[
        bool, typer.Option(help="Records and noise from the system's cryptographic source.")
    ] = False,
    arithmetic: Annotated[
        str,
        typer.Option(
            help="proved, or assumed: torch's faster noise, whose rounding is not proved.",
            callback=one_of("--arithmetic", "proved", "assumed", why="a guarantee says which it is"),
        ),
    ] = "proved",
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Begin only if the step is found to do what is charged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model with differential privacy; without arguments, on the bundled digits.

    Unless --noise or --plan is given, the noise is chosen so that all steps fit the budget.
    """
    import torch

    from hush.accounting.calibrate import calibrate
    from hush.audit import self_test as tried
    from hush.data import load, tensors
    from hush.data.features import with_features
    from hush.data.views import flips_and_shifts
    from hush.models import models_for
    from hush.report.signal import drowned
    from hush.training.loop import train as run_loop

    for option in ({"noise": noise}, {"rate": rate, "batch_size": batch_size}, {"clip": clip}):
        refuse_together(plan=plan, **option)
    tested = {"test_batch": test_batch, "test_noise": test_noise, "test_clip": test_clip}
    for name, given in {**tested, "threshold": threshold, "test": test}.items():
        refuse_together(plan=plan, **{name: given})
    refuse_together(steps=steps, epochs=epochs)
    refuse_together(adam=adam, momentum=momentum)
    RATE.check("--lr", learning_rate)
    MOMENTUM.check("--momentum", momentum or 0.0)
    budget = Budget(epsilon=epsilon, delta=delta)
    _VIEWS.check("--views", 1 if views is None else views)
    # before the data, whose features may take minutes
    written = None if plan is None else read_plan(plan)
    place = device_of(device)
    dataset = load(data, data_dir)
    if features is not None:
        dataset = with_features(dataset, features, device=str(place), directory=data_dir)
    x_train, y_train, x_test, y_test = tensors(dataset)
    public = None
    if public_records is not None:
        limit = len(x_train) - 1
        if not 0 < public_records <= limit:
            raise InvalidValue(
                f"--public-records {public_records} must be > 0 and <= {limit}: public records have no "
                "protection, and someone is to be left to protect. Pass e.g. --public-records 100."
            )
        public = x_train[:public_records], y_train[:public_records]
        x_train, y_train = x_train[public_records:], y_train[public_records:]
    if views is not None and (features is not None or x_train.dim() != 4):
        what = data if features is None else f"{features} features"
        raise InvalidValue(
            f"--views {views} is for images, and {what} are none: shifts and flips would make other "
            "records of them. Leave it out."
        )
    # an eighth of the side: the usual 4 pixels of 32 would push most of an 8-pixel image out of sight
    seen = None if views is None else flips_and_shifts(views, shift=min(4, x_train.shape[-1] // 8))
    records = len(x_train)
    if written is not None:
        value = written
        total = None if steps is None and epochs is None else steps_of(steps, epochs, value)
    else:
        size = batch_size if batch_size is not None else min(256, records)
        norm = 1.0 if clip is None else clip
        value = plan_of(sampling_of(rate, records, size), 1.0 if noise is None else noise, norm)
        release = release_of(records, test_batch, test_noise, test_clip, threshold, test)
        value = replace(value, release=release)
        total = steps_of(steps, 20 if epochs is None else epochs, value)
        value = value if noise is not None else calibrate(value, budget, steps=total)

    generator = None
    if seed is not None:
        torch.manual_seed(seed)
        generator = torch.Generator(place).manual_seed(seed)
    usual = _MODELS[data] if features is None else models_for(data, features)[-1]
    made = Experiment(
        settings=Settings(
            data=data,
            model=model or usual,
            delta=delta,
            learning_rate=learning_rate,
            momentum=momentum or 0.0,
            adam=bool(adam),
            features=features,
            views=views,
            public_records=public_records or 0,
            secure=secure,
        ),
        train=(x_train.to(place), y_train.to(place)),
        test=(x_test.to(place), y_test.to(place)),
        public=None if public is None else (public[0].to(place), public[1].to(place)),
        views=seen,
        classes=dataset.classes,
    )
    network, optimizer = made.begin()
    dimension = sum(each.numel() for each in network.parameters() if each.requires_grad)
    if total is not None:
        warning = drowned(value, records=records, steps=total, dimension=dimension)
        if warning:
            print(f"hush: {warning}", file=sys.stderr)
    folder = run_dir or next(
        path for n in count(1) if not (path := Path("runs") / f"{data}-{n}").exists()
    )
    if resume:
        check_plan_kept(folder, value, budget, total, dimension)
    try:
        result = run_loop(
            network,
            torch.nn.CrossEntropyLoss(),
            optimizer,
            value,
            made.train,
            budget=budget,
            steps=total,
            evaluation=made.test,
            directory=folder,
            resume=resume,
            reseed=reseed,
            generator=generator,
            secure=secure,
            arithmetic=cast(Arithmetic, arithmetic),
            physical_batch=physical_batch,
            views=seen,
            public=made.public,
            self_test=tried if self_test else None,
            progress=not as_json,
        )
    except KeyboardInterrupt:
        if (folder / "plan.toml").exists():
            again = f"--run-dir {folder} --resume"
            print(f"hush: stopped; go on with the same command and {again}", file=sys.stderr)
        raise
    made.settings.write(folder)
    final = result.metrics[-1]
    if as_json:
        print_json(
            {
                "guarantee": result.guarantee.to_plain(),
                "steps": result.steps,
                "accepted": result.accepted,
                "stopped": result.stopped,
                "final": final,
                "plan": value.to_plain(),
                "seeded": seed is not None,
                "directory": str(folder),
            }
        )
        return
    print(
        f"{data}: accuracy {final['accuracy']:.2%}, loss {final['loss']:.4f} on {len(x_test)} test "
        f"records after {result.steps} steps"
    )
    if result.accepted is not None:
        print(f"{result.accepted} of {result.steps} trials were accepted")
    print(result.guarantee)
    if public is not None:
        print(f"for {records} records; the {public_records} public ones have no protection")
    if seed is not None:
        print(
            "the noise came from a known seed: the guarantee holds only while the seed stays secret and "
            "serves no other run"
        )
    if result.stopped == "budget":
        print("stopped early: another step would have gone over the budget")
    if result.skipped:
        print(
            f"{result.skipped} times a record's gradient was not finite and was left out "
            "(this number is sensitive: it is in no file to publish)"
        )
    print(f"weights to publish: {folder / 'model.safetensors'}; the ledger and metrics are beside it")
