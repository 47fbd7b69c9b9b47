"""`hush train`: a private training run from command-line options."""

import sys
from dataclasses import replace
from typing import Annotated, cast

import typer

from hush.cli.options import (
    AsJson,
    BatchSize,
    Data,
    DataDir,
    Delta,
    Device,
    Epochs,
    Epsilon,
    Features,
    LearningRate,
    Model,
    NeighboursOption,
    Noise,
    PerUnit,
    PlanFile,
    PublicCount,
    Quiet,
    Rate,
    Resume,
    RunDir,
    Seed,
    Steps,
    TestBatch,
    TestClip,
    TestKind,
    TestNoise,
    TestThreshold,
    UnitGradient,
    UnitsFile,
    check_units,
    device_of,
    one_of,
    plan_of,
    refuse_together,
    release_of,
    sampling_of,
    steps_of,
)
from hush.cli.output import SEED_NOTICE, counted, print_json
from hush.cli.runs.experiment import (
    LEARNING_RATE,
    MOMENTUM,
    Settings,
    build_experiment,
    check_same_plan,
    new_folder,
)
from hush.core.guarantee import Adjacency, Arithmetic, Budget, Neighbours
from hush.core.plan import read_plan
from hush.core.value import Range, check_count
from hush.training.options import Execution, Randomness

_VIEWS = Range(
    at_least=1,
    at_most=1024,
    why="each is a pass over the record, which has one clipped gradient however many there are",
    example=4,
)


def train(
    data: Data = "digits",
    data_dir: DataDir = None,
    features: Features = None,
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
    test_threshold: TestThreshold = None,
    test: TestKind = None,
    plan: PlanFile = None,
    learning_rate: LearningRate = 1.0,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD.")] = None,
    adam: Annotated[bool | None, typer.Option("--adam", help="Adam instead of SGD.")] = None,
    physical_batch: Annotated[
        int | None,
        typer.Option(help="Records in memory at once, or one owner's if more; changes no result."),
    ] = None,
    views: Annotated[
        int | None, typer.Option(help="Flipped and shifted views of an image, averaged before clipping.")
    ] = None,
    public_records: Annotated[
        int | None,
        typer.Option(help="Training records given up as public ones, for plans with public bases."),
    ] = None,
    units: UnitsFile = None,
    per_unit: PerUnit = None,
    unit_gradient: UnitGradient = None,
    neighbours: NeighboursOption = None,
    records: PublicCount = None,
    device: Device = None,
    run_dir: RunDir = None,
    resume: Resume = False,
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
        bool, typer.Option("--self-test", help="Begin only if the step does what is charged.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a model with differential privacy; without arguments, on the bundled digits.

    Unless --noise or --plan is given, the noise is chosen so that all steps fit the budget.
    """
    import torch

    from hush.accounting.calibrate import calibrate
    from hush.audit import self_test as check_step
    from hush.models import default_model
    from hush.report.signal_to_noise import drowned
    from hush.training.loop import train as run_loop
    from hush.training.run_folder import check_settings

    plan_options = {
        "noise": noise,
        "clip": clip,
        "test_batch": test_batch,
        "test_noise": test_noise,
        "test_clip": test_clip,
        "test_threshold": test_threshold,
        "test": test,
    }
    refuse_together(plan=plan, rate=rate, batch_size=batch_size)
    for name, value in plan_options.items():
        refuse_together(plan=plan, **{name: value})
    refuse_together(steps=steps, epochs=epochs)
    refuse_together(adam=adam, momentum=momentum)
    LEARNING_RATE.check("--lr", learning_rate)
    MOMENTUM.check("--momentum", momentum or 0.0)
    budget = Budget(epsilon=epsilon, delta=delta)
    _VIEWS.check("--views", 1 if views is None else views)
    if public_records is not None:
        check_count("--public-records", public_records, "they lose their protection", at_least=1)
    check_units(units, per_unit, unit_gradient, neighbours, records)
    # before the data, whose features may take minutes
    plan_of_file = None if plan is None else read_plan(plan)
    settings = Settings(
        data=data,
        model=model or default_model(data, features),
        delta=delta,
        learning_rate=learning_rate,
        momentum=momentum or 0.0,
        adam=bool(adam),
        features=features,
        views=views,
        public_records=public_records or 0,
        secure=secure,
        per_unit=per_unit,
        unit_gradient=unit_gradient,
        neighbours=None if neighbours is None else Neighbours(neighbours),
        records=records,
    )
    if resume and run_dir is not None and (run_dir / "plan.toml").exists():
        check_settings(run_dir, settings.to_plain())
    torch_device = device_of(device)
    experiment = build_experiment(settings, data_dir, torch_device, units)
    unit_count = experiment.public_count()
    adjacency = Adjacency(neighbours=settings.relation)
    if plan_of_file is not None:
        private = plan_of_file
        total = None if steps is None and epochs is None else steps_of(steps, epochs, private)
    else:
        size = batch_size if batch_size is not None else min(256, unit_count)
        norm = 1.0 if clip is None else clip
        unit = "record" if units is None else "owner"
        sampled = sampling_of(rate, unit_count, size, unit)
        private = plan_of(sampled, 1.0 if noise is None else noise, norm)
        release = release_of(unit_count, test_batch, test_noise, test_clip, test_threshold, test, unit)
        private = replace(private, release=release)
        total = steps_of(steps, 20 if epochs is None else epochs, private)
        if noise is None:
            private = calibrate(private, budget, steps=total, adjacency=adjacency)

    generator = None
    if seed is not None:
        torch.manual_seed(seed)
        generator = torch.Generator(torch_device).manual_seed(seed)
    network, optimizer = experiment.initialise()
    dimension = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    if total and (warning := drowned(private, records=unit_count, steps=total, dimension=dimension)):
        print(f"hush: {warning}", file=sys.stderr)
    folder = run_dir or new_folder(data)
    if resume:
        check_same_plan(folder, private, budget, total, dimension, adjacency)
    try:
        run = run_loop(
            network,
            torch.nn.CrossEntropyLoss(),
            optimizer,
            private,
            experiment.train,
            budget=budget,
            steps=total,
            evaluation=experiment.test,
            directory=folder,
            resume=resume,
            reseed=reseed,
            randomness=Randomness(
                generator=generator, secure=secure, arithmetic=cast(Arithmetic, arithmetic)
            ),
            execution=Execution(physical_batch=physical_batch),
            records=records,
            units=experiment.units,
            neighbours=settings.relation,
            views=experiment.views,
            public=experiment.public,
            settings=settings.to_plain(),
            self_test=check_step if self_test else None,
            progress=not quiet,
        )
    except KeyboardInterrupt:
        if (folder / "plan.toml").exists():
            resuming = f"--run-dir {folder} --resume"
            print(f"hush: stopped; go on with the same command and {resuming}", file=sys.stderr)
        raise
    if as_json:
        print_json(
            {
                "guarantee": run.guarantee.to_plain(),
                "steps": run.steps,
                "accepted": run.accepted,
                "stopped": run.stopped,
                "final": run.metrics[-1],
                "plan": private.to_plain(),
                "seeded": seed is not None,
                "directory": str(folder),
            }
        )
        return
    final = run.metrics[-1]
    print(
        f"{data}: accuracy {final['accuracy']:.2%}, loss {final['loss']:.4f} on "
        f"{counted(len(experiment.test[1]), 'test record')} after {counted(run.steps, 'step')}"
    )
    if run.accepted is not None:
        print(f"{run.accepted} of {run.steps} trials were accepted")
    print(run.guarantee)
    if public_records is not None:
        print(f"for the private records; {counted(public_records, 'public one')} without protection")
    if seed is not None:
        print(SEED_NOTICE)
    if run.stopped == "budget":
        print("stopped early: another step would have gone over the budget")
    if run.skipped:
        print(
            f"{run.skipped} times a record's gradient was not finite and was left out "
            "(this number is sensitive: it is in no file to publish)"
        )
    print(f"weights to publish: {folder / 'model.safetensors'}; the ledger and metrics are beside it")
