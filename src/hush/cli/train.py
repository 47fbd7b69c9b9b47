"""`hush train` and `hush tune`: a private run, and private selection of its hyperparameters."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hush.cli import options as opt
from hush.cli.experiment import (
    LEARNING_RATE,
    MOMENTUM,
    Settings,
    build_experiment,
    check_same_plan,
    folder_of,
    signal_to_noise,
)
from hush.cli.output import SEED_NOTICE, counted, print_error, print_run
from hush.clipping import L2
from hush.core.atomic_files import replace_file
from hush.core.errors import InvalidValue
from hush.core.guarantee import Adjacency, Budget, Neighbours
from hush.core.plan import Plan
from hush.core.release import MEAN
from hush.core.value import Range, check_count
from hush.noise import Quantized, Rectified, StochasticSign, Truncated
from hush.sampling import FullBatch

if TYPE_CHECKING:
    from torch import nn

    from hush.training.per_instance import PerInstance
    from hush.training.trial import Dimension, TuningTrial

_VIEWS = Range(
    at_least=1, at_most=1024, why="each is a pass over the record, clipped once for all", example=4
)
_CLIP = Range(above=0, at_most=1e15, why="without a bound no noise hides a record", example=1.0)
_search = partial(opt.about, panel="Search")
_RANGE = "one number, several as 0.5,1,2, or a range as 0.1:10 (uniform in the logarithm)"


def train(
    data: opt.Data = "digits",
    data_dir: opt.DataDir = None,
    features: opt.Features = None,
    model: opt.Model = None,
    epsilon: opt.Epsilon = 3.0,
    delta: opt.Delta = 1e-5,
    noise: opt.Noise = None,
    rate: opt.Rate = None,
    batch_size: opt.BatchSize = None,
    clip: Annotated[float | None, opt.privacy("Clipping norm; 1 by default.")] = None,
    plan: opt.PlanName = None,
    beta: Annotated[float | None, opt.privacy("Shape of the noise of a named plan.")] = None,
    coordinate_rate: Annotated[float | None, opt.privacy("Rate of coordinates of a named plan.")] = None,
    cap: Annotated[float | None, opt.privacy("Cap on each entry of a named plan.")] = None,
    bound: Annotated[float | None, opt.privacy("Bound of the noise of a named plan.")] = None,
    units: opt.UnitsFile = None,
    per_unit: Annotated[int | None, opt.privacy("Most records of one owner in a step.")] = None,
    neighbours: opt.AdjacencyName = None,
    records: Annotated[int | None, opt.privacy("Public number of records, for add/remove.")] = None,
    public_records: Annotated[int | None, opt.privacy("Training records without protection.")] = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    learning_rate: opt.LearningRate = 1.0,
    momentum: Annotated[float, opt.training("Momentum of SGD.")] = 0.0,
    physical_batch: Annotated[int | None, opt.training("Records in memory at once.")] = None,
    views: Annotated[int | None, opt.training("Views of an image, averaged before clipping.")] = None,
    test_batch: Annotated[int | None, opt.testing("Expected batch of a test.")] = None,
    test_noise: Annotated[float | None, opt.testing("Noise multiplier of the test.")] = None,
    test_clip: Annotated[float | None, opt.testing("Bound on the change of the loss.")] = None,
    test_threshold: Annotated[
        float | None, opt.testing("Accept below so many clips; -1 by default.")
    ] = None,
    test: Annotated[
        str | None,
        opt.chosen(
            opt.testing,
            "Statistic of the test; summed by default",
            *("summed", "mean"),
            why="its cost is proved for these",
        ),
    ] = None,
    per_instance: Annotated[
        int | None,
        opt.running("Records whose own cost is computed (sensitive); 100 under bounded noise."),
    ] = None,
    device: opt.Device = None,
    run_dir: opt.RunDir = None,
    resume: opt.Resume = False,
    reseed: Annotated[bool, opt.running("Resume with new randomness and new charges.")] = False,
    seed: opt.Seed = None,
    secure: Annotated[bool, opt.running("All randomness from the operating system.")] = False,
    self_test: Annotated[bool, opt.running("Audit the step first.", "--self-test")] = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a model with differential privacy; without arguments, on the bundled digits.

    Without --noise and --plan, the noise is calibrated to the budget for all steps.

    Example: hush train --epsilon 3 --epochs 20 --lr 1

    A method of a paper: hush train --plan dpsur --epsilon 3 --epochs 20
    """
    import torch

    from hush.accounting.calibrate import calibrate
    from hush.accounting.mechanism import grows_with_dimension
    from hush.audit import self_test as check_step
    from hush.models import default_model
    from hush.training.loop import train as run_loop
    from hush.training.options import Checkpoints, Execution, Logging, Randomness
    from hush.training.run_folder import check_settings

    tests: dict[str, Any] = {"test-noise": test_noise, "test-clip": test_clip}
    tests |= {"test-threshold": test_threshold, "test": test}
    shape = {"beta": beta, "coordinate-rate": coordinate_rate, "cap": cap, "bound": bound}
    parts = {"noise": noise, "clip": clip, **shape, **tests}
    opt.refuse_together(rate=rate, batch_size=batch_size)
    opt.refuse_together(steps=steps, epochs=epochs)
    LEARNING_RATE.check("--lr", learning_rate)
    MOMENTUM.check("--momentum", momentum)
    _VIEWS.check("--views", 1 if views is None else views)
    if public_records is not None:
        check_count("--public-records", public_records, "they have no protection", at_least=1)
    _check_units(units, per_unit, neighbours, records)
    budget = Budget(epsilon=epsilon, delta=delta)
    folder = folder_of(run_dir, data)
    private = None
    if plan is not None:  # before the data, whose features take minutes
        rates = {"rate": rate if batch_size is None else 0.5, "test-rate": test_batch and 0.5}
        private = opt.plan_at(plan, {**rates, **parts})
    else:
        for name in [name for name, value in shape.items() if value is not None]:
            raise InvalidValue(
                f"--{name} is a hyperparameter of a named plan. Pass --plan, see `hush plans`."
            )
    settings = Settings(
        data=data,
        model=model or default_model(data, features),
        delta=delta,
        learning_rate=learning_rate,
        momentum=momentum,
        features=features,
        views=views,
        public_records=public_records or 0,
        secure=secure,
        per_unit=per_unit,
        # the default is stored as None: a resumed run may spell it out
        neighbours=None if neighbours in (None, Neighbours.ZERO_OUT) else Neighbours(neighbours),
        records=records,
    )
    if resume and run_dir is not None and (run_dir / "plan.toml").exists():
        check_settings(run_dir, settings.to_plain())
    torch_device = opt.device_of(device)
    experiment = build_experiment(settings, data_dir, torch_device, units)
    unit_count, unit = experiment.public_count(), "record" if units is None else "owner"
    generator = None
    if seed is not None:
        torch.manual_seed(seed)
        generator = torch.Generator(torch_device).manual_seed(seed)
    network, optimizer = experiment.initialise()
    dimension = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    if plan is not None and opt.is_named(plan):
        if batch_size is not None:
            rate = opt.share_of("--batch-size", batch_size, unit_count, unit, unit_count // 100)
        if test_batch is not None:
            parts["test-rate"] = opt.share_of("--test-batch", test_batch, unit_count, unit, 256)
        private = opt.plan_at(plan, {"rate": rate, **parts}, dimension)
    elif private is None:
        size = min(256, unit_count) if batch_size is None else batch_size
        private = opt.plan_of(
            opt.sampling_of(rate, unit_count, size, unit),
            1.0 if noise is None else noise,
            1.0 if clip is None else clip,
            opt.release_of(unit_count, unit, test_batch, tests),
        )
    if plan is not None and not opt.is_named(plan):
        total = None if steps is None and epochs is None else opt.steps_of(steps, epochs, private)
    else:
        total = opt.steps_of(steps, 20 if steps is None and epochs is None else epochs, private)
        if noise is None:
            adjacency = Adjacency(neighbours=settings.relation)
            charged = dimension if grows_with_dimension(private) else None
            private = calibrate(private, budget, total, charged, adjacency=adjacency)
    if total and (ratio := signal_to_noise(private, unit_count, total, dimension)) < 1:
        print_error(
            f"the noise is larger than the signal: over {total} steps the records can move the "
            f"{dimension} parameters {ratio:.2g} times as far as the noise does, and only if all "
            "gradients agree. Allow a larger epsilon, a larger batch, or train fewer parameters."
        )
    if resume:
        check_same_plan(folder, private)
    watched = _watched(per_instance, private, len(experiment.train[1]))
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
            checkpoints=Checkpoints(
                directory=folder, resume=resume, reseed=reseed, settings=settings.to_plain()
            ),
            randomness=Randomness(generator=generator, secure=secure),
            execution=Execution(physical_batch=physical_batch),
            records=records,
            units=experiment.units,
            neighbours=settings.relation,
            views=experiment.views,
            public=experiment.public,
            self_test=check_step if self_test else None,
            per_instance=watched,
            logging=Logging(progress=not quiet),
        )
    except KeyboardInterrupt:
        if (folder / "plan.toml").exists():
            resuming = f"--run-dir {folder} --resume"
            print_error(f"stopped; continue with the same command and {resuming}")
        raise
    final = run.metrics[-1]
    if as_json:
        plain = {"steps": run.steps, "accepted": run.accepted, "stopped": run.stopped, "final": final}
        print_run(run.guarantee, plain | {"plan": private.to_plain()}, seed, folder)
        return
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
        print("stopped early: another step would exceed the budget")
    if watched is not None:
        print(f"sensitive, of {counted(len(watched.charges), 'watched record')} (in per_instance.npz):")
        print(f"  per-instance epsilon at delta {delta:g}: {_quantiles(watched.epsilons(delta))}")
        print(f"  Fisher information loss: {_quantiles(watched.losses())}")
        print("  accumulated along this run: no guarantee of the run, which is the epsilon above")
    if run.skipped:
        print(
            f"{run.skipped} times a record's gradient was not finite and was left out "
            "(this number is sensitive and in no published file)"
        )
    print(f"weights to publish: {folder / 'model.safetensors'}; the ledger and metrics are beside it")


def _check_units(
    units: Path | None, per_unit: int | None, neighbours: str | None, records: int | None
) -> None:
    """Raise if options of the unit of privacy lack one another."""
    if (units is None) != (per_unit is None):
        raise InvalidValue(
            "--units FILE names the owner of each record, --per-unit N limits the records of one owner "
            "in a step: the guarantee depends on both. Pass both, e.g. with --per-unit 1, or neither."
        )
    if per_unit is not None:
        check_count("--per-unit", per_unit, "a sampled owner takes part with a record or more", 1)
    if records is not None:
        check_count("--records", records, "the divisor of the update is a public number", 1)
    elif neighbours == Neighbours.ADD_REMOVE:
        raise InvalidValue(
            "--neighbours add/remove keeps the number of records private: rate, divisor and steps need "
            "a public constant near it. Pass e.g. --records 60000."
        )


def tune(
    data: opt.Data = "digits",
    data_dir: opt.DataDir = None,
    features: opt.Features = None,
    model: opt.Model = None,
    epsilon: opt.Epsilon = 3.0,
    delta: opt.Delta = 1e-5,
    rate: opt.Rate = None,
    batch_size: opt.BatchSize = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    learning_rate: Annotated[str, _search(f"Learning rates: {_RANGE}.", "--lr")] = "0.1:10",
    clip: Annotated[str, _search(f"Clipping norms: {_RANGE}.")] = "0.1:10",
    momentum: Annotated[str, _search("Momentum of SGD: one number, or several.")] = "0",
    trials: Annotated[float, _search("Expected number of trials.")] = 10.0,
    held_out: Annotated[int | None, _search("Records held out for scores; 0: test records.")] = None,
    device: opt.Device = None,
    run_dir: opt.RunDir = None,
    resume: opt.Resume = False,
    seed: opt.Seed = None,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Choose hyperparameters by private random search: the budget covers all trials.

    The best trial is released. The number of trials, their run time and all others stay secret.

    Example: hush tune --lr 0.3:10 --clip 0.3,1,3 --epochs 10
    """
    import torch

    from hush.models import default_model
    from hush.training.evaluate import evaluate
    from hush.training.loop import train as run_loop
    from hush.training.options import Randomness
    from hush.training.run_folder import SETTINGS, metrics_line
    from hush.training.tune import tune as run_tune

    opt.refuse_together(rate=rate, batch_size=batch_size)
    opt.refuse_together(steps=steps, epochs=epochs)
    budget = Budget(epsilon=epsilon, delta=delta)
    MEAN["range"].check("--trials", trials)
    folder = folder_of(run_dir, f"{data}-tuned")
    space = {
        "learning_rate": _dimension("--lr", learning_rate, LEARNING_RATE),
        "clip": _dimension("--clip", clip, _CLIP),
        "momentum": _dimension("--momentum", momentum, MOMENTUM),
    }
    settings = Settings(
        data=data,
        model=model or default_model(data, features),
        delta=delta,
        learning_rate=1.0,
        features=features,
    )
    experiment = build_experiment(settings, data_dir, opt.device_of(device))
    inputs, labels = experiment.train
    scored = max(1, len(labels) // 10) if held_out is None else held_out
    if check_count("--held-out", scored, "the score is a share of them", 0) >= len(labels):
        raise InvalidValue(
            f"--held-out {scored} must be below the {counted(len(labels), 'training record')}: the "
            f"others train the model. Pass e.g. --held-out {max(1, len(labels) // 10)}."
        )
    training = replace(experiment, train=(inputs[scored:], labels[scored:]))
    count = len(labels) - scored
    size = min(256, count) if batch_size is None else batch_size
    private = opt.plan_of(opt.sampling_of(rate, count, size), 1.0)
    loss = torch.nn.CrossEntropyLoss()

    def fit(chosen: dict[str, Any], trial: "TuningTrial") -> "tuple[nn.Module, float]":
        """Training and score of one trial."""
        generator = None
        if trial.generator is not None:
            seed = trial.generator.initial_seed()
            torch.manual_seed(seed)
            generator = torch.Generator(inputs.device).manual_seed(seed)
        parts = {name: chosen[name] for name in ("learning_rate", "momentum")}
        own = replace(training, settings=replace(settings, **parts))
        network, optimizer = own.initialise()
        run_loop(
            network,
            loss,
            optimizer,
            trial.plan,
            training.train,
            budget=trial.budget,
            steps=trial.steps,
            ledger=trial.ledger,
            randomness=Randomness(generator=generator),
        )
        if not scored:
            return network, evaluate(network, loss, experiment.test)["accuracy"]
        network.eval()
        with torch.no_grad():
            answers = [network(part).argmax(1) for part in inputs[:scored].split(1024)]
        return network, trial.score((torch.cat(answers) == labels[:scored]).cpu())

    tuned = run_tune(
        fit,
        space,
        plan=lambda chosen: replace(private, clipping=L2(norm=chosen["clip"])),
        steps=opt.steps_of(steps, 20 if epochs is None else epochs, private),
        budget=budget,
        mean=trials,
        score_noise=10.0 if scored else None,
        directory=folder,
        resume=resume,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
        progress=not quiet,
    )
    final = evaluate(tuned.model, loss, experiment.test)
    searched = {"learning_rate": learning_rate, "clip": clip, "momentum": momentum, "held_out": scored}
    stored = json.dumps({**settings.to_plain(), **searched}) + "\n"
    replace_file(folder / SETTINGS, stored.encode())
    replace_file(folder / "metrics.jsonl", metrics_line(tuned.guarantee, 1, **final).encode())
    if as_json:
        plain = {"settings": tuned.settings, "score": tuned.score, "final": final}
        print_run(tuned.guarantee, plain | {"plan": tuned.plan.to_plain()}, seed, folder)
        return
    best = ", ".join(f"{name} {value:.4g}" for name, value in tuned.settings.items())
    kind = "noisy accuracy on held-out private records" if scored else "accuracy on the test records"
    print(f"{data}: {best}; {kind} {tuned.score:.2%}")
    print(f"accuracy {final['accuracy']:.2%} on {counted(len(experiment.test[1]), 'test record')}")
    print(f"{tuned.guarantee}, of the whole search")
    if not scored:
        print("the test records chose the settings: their accuracy is not that on new records")
    if seed is not None:
        print(SEED_NOTICE)
    print(f"weights to publish: {folder / 'model.safetensors'}; the ledger and settings are beside it")


def _watched(count: int | None, plan: Plan, slots: int) -> "PerInstance | None":
    """Per-instance costs of the first records, by default of full-batch plans with bounded noise."""
    from hush.training.per_instance import PerInstance

    if count is None:
        bounded = isinstance(plan.noise, Rectified | Truncated | Quantized | StochasticSign)
        count = 100 if bounded and isinstance(plan.sampling, FullBatch) else 0
    count = check_count("--per-instance", count, "they are counted", at_least=0)
    return PerInstance(slots=range(min(count, slots)), iterations=20) if count else None


def _quantiles(values: Any) -> str:
    """Minimum, median, 90% quantile and maximum of sensitive numbers."""
    import numpy as np

    shares = {"least": 0.0, "median": 0.5, "90%": 0.9, "largest": 1.0}
    ends = np.quantile(values, list(shares.values()))
    return ", ".join(f"{name} {value:.3g}" for name, value in zip(shares, ends, strict=True))


def _dimension(option: str, text: str, allowed: Range) -> "Dimension":
    """The range or choice in the text of an option."""
    from hush.training.trial import Choice, LogUniform

    ends = text.split(":")
    try:
        numbers = [float(part) for part in (ends if len(ends) > 1 else text.split(","))]
    except ValueError:
        numbers = []
    for number in numbers:
        allowed.check(option, number)
    if numbers and len(ends) == 1:
        return Choice(*numbers)
    if len(numbers) != 2 or numbers[0] <= 0:
        raise InvalidValue(f"{option} {text} must be {_RANGE}: the search is over these values.")
    return LogUniform(numbers[0], numbers[1])
