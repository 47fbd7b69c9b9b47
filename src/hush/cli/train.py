"""`hush train` and `hush tune`: a private run, and private selection of its hyperparameters."""

import json
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from hush.cli import experiment as experiments
from hush.cli import options as opt
from hush.cli.experiment import Settings, build_experiment, folder_of
from hush.cli.output import counted, print_error, print_run
from hush.clipping import L2, Subspaces
from hush.core.atomic_files import replace_file
from hush.core.errors import InvalidPlan, InvalidValue
from hush.core.guarantee import DEFAULT_DELTA, Adjacency, Budget, Neighbours, at_most
from hush.core.plan import Plan
from hush.core.release import MEAN, Test
from hush.core.value import Range, check_count
from hush.noise import Quantized, Rectified, StochasticSign, Truncated
from hush.sampling import FullBatch

if TYPE_CHECKING:
    from torch import nn

    from hush.training.per_instance import PerInstance
    from hush.training.trial import Choice, TuningTrial, Uniform

_CLIP = Range(above=0, at_most=1e15, why="without a bound no noise hides a record", example=1.0)
_search = partial(opt.about, panel="Search")
_RANGE = "one number, several as 0.5,1,2, or a range as 0.1:10 (uniform in the logarithm)"
_WATCHED = "Records whose own cost is computed (sensitive); 100 if noise is bounded."
_BATCH = "Expected batch size, in place of the rate; 256 by default."
_EPOCHS = 20
_STEPS = f"Number of steps; {_EPOCHS} epochs by default."


@dataclass(frozen=True, kw_only=True)
class Training(opt.Work):
    batch_size: Annotated[int | None, opt.privacy(_BATCH)] = None
    steps: Annotated[int | None, opt.training(_STEPS)] = None
    data: opt.Data = "digits"
    data_dir: opt.DataDir = None
    features: opt.Features = None
    model: opt.Model = None
    epsilon: opt.Epsilon = 3.0
    delta: opt.Delta = DEFAULT_DELTA
    device: opt.Device = None
    run_dir: opt.RunDir = None
    resume: opt.Resume = False
    seed: opt.Seed = None
    quiet: opt.Quiet = False
    as_json: opt.AsJson = False


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    noise: opt.Noise = None
    clip: Annotated[float | None, opt.privacy("Clipping norm; 1 by default.")] = None
    plan: opt.PlanName = None
    beta: Annotated[float | None, opt.privacy("Shape of the noise of a named plan.")] = None
    coordinate_rate: Annotated[float | None, opt.privacy("Rate of coordinates of a named plan.")] = None
    cap: Annotated[float | None, opt.privacy("Cap on each entry of a named plan.")] = None
    bound: Annotated[float | None, opt.privacy("Bound of a named plan, in deviations.")] = None
    units: opt.UnitsFile = None
    per_unit: Annotated[int | None, opt.privacy("Most records of one owner in a step.")] = None
    neighbours: opt.Relation = None
    records: Annotated[int | None, opt.privacy("Public number of records, for add/remove.")] = None
    public_records: Annotated[int, opt.privacy("Training records without protection.")] = 0
    learning_rate: opt.LearningRate = 1.0
    momentum: Annotated[float, opt.training("Momentum of SGD.")] = 0.0
    physical_batch: Annotated[int | None, opt.training("Records in memory at once.")] = None
    views: Annotated[int | None, opt.training("Views of an image, averaged before clipping.")] = None
    test_batch: Annotated[int | None, opt.testing("Expected batch of a test.")] = None
    test_noise: Annotated[float | None, opt.testing("Noise multiplier of the test.")] = None
    test_clip: Annotated[float | None, opt.testing("Bound on the change of the loss.")] = None
    test_threshold: Annotated[float | None, opt.testing("Accept below so many clips; else -1.")] = None
    test: Annotated[Test | None, opt.testing("Statistic; summed, or a named plan's.")] = None
    per_instance: Annotated[int | None, opt.running(_WATCHED)] = None
    reseed: Annotated[bool, opt.running("Resume with new randomness and new charges.")] = False
    secure: Annotated[bool, opt.running("All randomness from the operating system.")] = False
    self_test: Annotated[bool, opt.running("Audit the step first.", "--self-test")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.units is None) != (self.per_unit is None):
            raise InvalidValue(
                "--units FILE names the owner of each record, --per-unit N limits the records of one "
                "owner in a step. Pass both, e.g. with --per-unit 1, or neither."
            )

    def hyperparameters(self) -> dict[str, Any]:
        """Values of the hyperparameters of a plan by option; rates of batch sizes are examples."""
        values = {name: getattr(self, name.replace("-", "_"), None) for name in opt.HYPERPARAMETERS}
        batches = {"rate": self.batch_size, "test-rate": self.test_batch}
        return values | {name: 0.5 for name, size in batches.items() if size is not None}

    def private_plan(self, units: int, unit: str, dimension: int) -> Plan:
        """The plan for this number of units of privacy, before its noise is calibrated."""
        values, size, test = self.hyperparameters(), self.batch_size, self.test_batch
        if self.plan is not None:
            if size is not None:
                values["rate"] = opt.share_of("--batch-size", size, units, unit)
            if test is not None:
                values["test-rate"] = opt.share_of("--test-batch", test, units, unit)
            return opt.plan_at(self.plan, values, parameters=dimension, public=self.public_records)
        size = min(256, units) if size is None else size
        sampling = opt.sampling_of(self.rate, units, size, unit)
        return opt.plan_of(sampling, self.noise, self.clip, opt.release_of(units, unit, test, values))

    def settings(self, model: str) -> Settings:
        same = {each.name: getattr(self, each.name) for each in fields(Settings)}
        if self.neighbours is Neighbours.ZERO_OUT:  # a resumed run may spell out the default
            same["neighbours"] = None
        return Settings(**same | {"model": model})


@opt.takes(Run)
def train(asked: Run) -> None:
    """Train a model with differential privacy; without arguments, on the bundled digits.

    Without --noise, the noise is calibrated to the budget for all steps, also for a named plan, which
    has its own rate and clipping norm. A plan file keeps its noise, and without steps or epochs it runs
    until the budget is spent.

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

    budget = Budget(epsilon=asked.epsilon, delta=asked.delta)
    folder = folder_of(asked.run_dir, asked.data)
    seed = asked.seed
    if asked.plan is not None:  # before the features of the data, which take minutes
        clipping = opt.plan_at(asked.plan, asked.hyperparameters()).clipping
        if isinstance(clipping, Subspaces) and clipping.bases is not None and not asked.public_records:
            raise InvalidPlan(
                f"--plan {asked.plan} clips in subspaces of public gradients, and no record is public. "
                "Pass e.g. --public-records 100: the first 100 training records lose their protection."
            )
    for name in ("beta", "coordinate-rate", "cap", "bound"):
        if asked.plan is None and asked.hyperparameters()[name] is not None:
            text = f"--{name} is a hyperparameter of a named plan. Pass --plan, see `hush plans`."
            raise InvalidValue(text)
    settings = asked.settings(asked.model or default_model(asked.data, asked.features))
    if asked.resume and (folder / "plan.toml").exists():
        check_settings(folder, settings.to_plain())
    device = opt.device_of(asked.device)
    experiment = build_experiment(settings, asked.data_dir, device, asked.units)
    units = experiment.public_count()
    generator = None
    if seed is not None:
        torch.manual_seed(seed)
        generator = torch.Generator(device).manual_seed(seed)
    network, optimizer = experiment.initialise()
    dimension = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    private = asked.private_plan(units, "record" if asked.units is None else "owner", dimension)
    from_file = asked.plan is not None and not opt.is_named(asked.plan)
    steps = None
    if not from_file or asked.steps is not None or asked.epochs is not None:
        steps = asked.count(private, _EPOCHS)
    if not from_file and asked.noise is None and steps is not None:
        adjacency = Adjacency(neighbours=settings.relation)
        charged = dimension if grows_with_dimension(private) else None
        begun, private = private, calibrate(private, budget, steps, charged, adjacency=adjacency)
        noise = private.noise
        if isinstance(noise, Rectified | Truncated):  # --bound is in deviations
            bound = noise.scale * begun.noise.to_plain()["bound"] / begun.noise.to_plain()["scale"]
            private = replace(private, noise=replace(noise, bound=bound))
    if steps and (ratio := experiments.signal_to_noise(private, units, steps, dimension)) < 1:
        print_error(
            f"the noise is larger than the signal: over {steps} steps the records can move the "
            f"{dimension} parameters {ratio:.2g} times as far as the noise does, and only if all "
            "gradients agree. Allow a larger epsilon, a larger batch, or train fewer parameters."
        )
    watched = _watched(asked.per_instance, private, len(experiment.train[1]))
    checkpoints = Checkpoints(
        directory=folder, resume=asked.resume, reseed=asked.reseed, settings=settings.to_plain()
    )
    loss = torch.nn.CrossEntropyLoss()
    try:
        run = run_loop(
            *(network, loss, optimizer, private, experiment.train),
            budget=budget,
            steps=steps,
            evaluation=experiment.test,
            checkpoints=checkpoints,
            randomness=Randomness(generator=generator, secure=asked.secure),
            execution=Execution(physical_batch=asked.physical_batch),
            records=asked.records,
            units=experiment.units,
            neighbours=settings.relation,
            views=experiment.views,
            public=experiment.public,
            self_test=check_step if asked.self_test else None,
            per_instance=watched,
            logging=Logging(progress=not asked.quiet),
        )
    except KeyboardInterrupt:
        if (folder / "plan.toml").exists():
            print_error(f"stopped; continue with the same command and --run-dir {folder} --resume")
        raise
    final = run.metrics[-1]
    lines = [
        f"{asked.data}: accuracy {final['accuracy']:.2%}, loss {final['loss']:.4f} on "
        f"{counted(len(experiment.test[1]), 'test record')} after {counted(run.steps, 'step')}"
    ]
    rates = f"learning rate {asked.learning_rate:g}, momentum {asked.momentum:g}"
    lines.append(f"{counted(run.steps, 'step')} of {private}, {rates}")
    if run.accepted is not None:
        lines.append(f"{run.accepted} of {run.steps} trials were accepted")
    lines.append(str(run.guarantee))
    if asked.public_records:
        public = counted(asked.public_records, "public one")
        lines.append(f"for the private records; {public} without protection")
    if from_file and run.stopped != "budget" and (spent := float(run.guarantee)) < 0.95 * asked.epsilon:
        way = f"hush calibrate --plan {asked.plan} --epsilon {asked.epsilon:g} --delta {asked.delta:g}"
        lines.append(
            f"the noise of {asked.plan} spends {at_most(spent)} of epsilon {asked.epsilon:g}: "
            f"`{way} --steps {run.steps}` finds the noise that spends it all"
        )
    if run.stopped == "budget":
        lines.append("stopped early: another step would exceed the budget")
    if watched is not None:
        delta, count = asked.delta, counted(len(watched.charges), "watched record")
        # the bound for any record holds for each of them
        own = [min(each, run.guarantee.epsilon.upper) for each in watched.epsilons(delta)]
        lines += [
            f"sensitive, of {count} (in per_instance.npz):",
            f"  per-instance epsilon at delta {delta:g}: {_quantiles(own)}",
            f"  Fisher information loss: {_quantiles(watched.losses())}",
            "  accumulated along this run: no guarantee of the run, which is the epsilon above",
        ]
    if run.skipped:
        lines.append(
            f"{run.skipped} times a record's gradient was not finite and was left out "
            "(this number is sensitive and in no published file)"
        )
    lines.append(f"weights to publish: {folder / 'model.safetensors'}; ledger and metrics are beside it")
    facts = {"steps": run.steps, "accepted": run.accepted, "stopped": run.stopped, "final": final}
    facts["plan"] = private.to_plain()
    print_run(run.guarantee, facts, lines, seed=seed, folder=folder, as_json=asked.as_json)


@opt.takes(Training)
def tune(
    asked: Training,
    learning_rate: Annotated[str, _search(f"Learning rates: {_RANGE}.", "--lr")] = "0.1:10",
    clip: Annotated[str, _search(f"Clipping norms: {_RANGE}.")] = "0.1:10",
    momentum: Annotated[str, _search("Momentum of SGD: one number, or several.")] = "0",
    trials: Annotated[float, _search("Expected number of trials.")] = 10.0,
    held_out: Annotated[int | None, _search("Records held out for scores; 0: test records.")] = None,
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
    from hush.training.run_folder import SETTINGS, metrics_line, metrics_of
    from hush.training.tune import tune as run_tune

    MEAN["range"].check("--trials", trials)
    folder = folder_of(asked.run_dir, f"{asked.data}-tuned")
    space = {
        "learning_rate": _dimension("--lr", learning_rate, experiments.LEARNING_RATE),
        "clip": _dimension("--clip", clip, _CLIP),
        "momentum": _dimension("--momentum", momentum, experiments.MOMENTUM),
    }
    settings = Settings(
        data=asked.data,
        model=asked.model or default_model(asked.data, asked.features),
        delta=asked.delta,
        learning_rate=1.0,
        features=asked.features,
    )
    experiment = build_experiment(settings, asked.data_dir, opt.device_of(asked.device))
    inputs, labels = experiment.train
    scored = max(1, len(labels) // 10) if held_out is None else held_out
    if check_count("--held-out", scored, "the score is a share of them", 0) >= len(labels):
        raise InvalidValue(
            f"--held-out {scored} must be below the {counted(len(labels), 'training record')}: the "
            f"others train the model. Pass e.g. --held-out {max(1, len(labels) // 10)}."
        )
    training = replace(experiment, train=(inputs[scored:], labels[scored:]))
    count = len(labels) - scored
    size = min(256, count) if asked.batch_size is None else asked.batch_size
    private = opt.plan_of(opt.sampling_of(asked.rate, count, size))
    loss = torch.nn.CrossEntropyLoss()

    def fit(chosen: dict[str, Any], trial: "TuningTrial") -> "tuple[nn.Module, float]":
        generator = None
        if trial.generator is not None:
            seed = trial.generator.initial_seed()
            torch.manual_seed(seed)
            generator = torch.Generator(inputs.device).manual_seed(seed)
        rate, momentum = chosen["learning_rate"], chosen["momentum"]
        own = replace(settings, learning_rate=rate, momentum=momentum)
        network, optimizer = replace(training, settings=own).initialise()
        run_loop(
            *(network, loss, optimizer, trial.plan, training.train),
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
        steps=asked.count(private, _EPOCHS),
        budget=Budget(epsilon=asked.epsilon, delta=asked.delta),
        mean=trials,
        score_noise=10.0 if scored else None,
        directory=folder,
        resume=asked.resume,
        generator=None if asked.seed is None else torch.Generator().manual_seed(asked.seed),
        progress=not asked.quiet,
    )
    final = evaluate(tuned.model, loss, experiment.test)
    searched = {"learning_rate": learning_rate, "clip": clip, "momentum": momentum, "held_out": scored}
    stored, line = {**settings.to_plain(), **searched}, metrics_of(1, tuned.guarantee, **final)
    replace_file(folder / SETTINGS, f"{json.dumps(stored)}\n".encode())
    replace_file(folder / "metrics.jsonl", metrics_line(line).encode())
    best = ", ".join(f"{name} {value:.4g}" for name, value in tuned.settings.items())
    kind = "noisy accuracy on held-out private records" if scored else "accuracy on the test records"
    lines = [
        f"{asked.data}: {best}; {kind} {tuned.score:.2%}",
        f"accuracy {final['accuracy']:.2%} on {counted(len(experiment.test[1]), 'test record')}",
        f"{tuned.guarantee}, of the whole search",
    ]
    if not scored:
        lines.append("the test records chose the settings: their accuracy is not that on new records")
    lines.append(
        f"weights to publish: {folder / 'model.safetensors'}; ledger and settings are beside it"
    )
    facts = {"settings": tuned.settings, "score": tuned.score, "final": final}
    facts["plan"] = tuned.plan.to_plain()
    print_run(tuned.guarantee, facts, lines, seed=asked.seed, folder=folder, as_json=asked.as_json)


def _watched(count: int | None, plan: Plan, slots: int) -> "PerInstance | None":
    """Per-instance costs of the first records, by default of full-batch plans with bounded noise."""
    from hush.training.per_instance import PerInstance

    if count is None:
        bounded = isinstance(plan.noise, Rectified | Truncated | Quantized | StochasticSign)
        count = 100 if bounded and isinstance(plan.sampling, FullBatch) else 0
    count = check_count("--per-instance", count, "they are counted", at_least=0)
    return PerInstance(slots=range(min(count, slots)), iterations=20) if count else None


def _quantiles(values: Any) -> str:
    import numpy as np

    least, median, most, largest = np.quantile(values, [0.0, 0.5, 0.9, 1.0])
    counts = " ".join(map(str, np.histogram(values, 10)[0]))
    return (
        f"least {least:.3g}, median {median:.3g}, 90% {most:.3g}, largest {largest:.3g}; "
        f"records in ten bins of equal width: {counts}"
    )


def _dimension(option: str, text: str, allowed: Range) -> "Uniform | Choice":
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
