"""`hush train` and `hush tune`: a private run, and private hyperparameter tuning."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hush.cli import experiment as experiments
from hush.cli import options as opt
from hush.cli.experiment import Settings, build_experiment, folder_of
from hush.cli.output import counted, print_error, print_run
from hush.clipping import L2, L2Linf, Subspaces
from hush.core.atomic_files import replace_file
from hush.core.errors import DataError, InvalidPlan, InvalidValue
from hush.core.guarantee import DEFAULT_DELTA, Adjacency, Budget, Neighbours, at_most
from hush.core.parts import SensitivitySet
from hush.core.plan import Plan
from hush.core.release import MEAN, Selective, Test
from hush.core.value import Range, check_count
from hush.noise import Quantized, Rectified, StochasticSign, Truncated
from hush.sampling import FullBatch
from hush.schema import read_schema

if TYPE_CHECKING:
    from torch import nn

    from hush.training.per_instance import PerInstance
    from hush.training.trial import Choice, TuningTrial, Uniform

_CLIP = Range(above=0, at_most=1e15, why="without a bound no noise hides a record", example=1.0)
_search = partial(opt.about, panel="Search")
_RANGE = "a number, a list such as 0.5,1,2, or a log-uniform range such as 0.1:10"
_WATCHED = "Number of records with per-instance privacy costs (sensitive); 100 for bounded noise."
_RATE = "Learning rate; by default 1, or 0.1 if the targets are numbers."
_BATCH = "Expected batch size, instead of --rate; 256 by default."
_BOUNDED = Rectified | Truncated | Quantized | StochasticSign
_EPOCHS = 20
_STEPS = f"Number of steps, or of trials; {_EPOCHS} epochs by default."


@dataclass(frozen=True, kw_only=True)
class Training(opt.StepOptions):
    batch_size: Annotated[int | None, opt.privacy(_BATCH)] = None
    steps: Annotated[int | None, opt.training(_STEPS)] = None
    data: opt.DataOrFile = "digits"
    target: opt.Target = None
    schema: opt.Schema = None
    test_data: opt.TestData = None
    data_dir: opt.DataDir = None
    features: opt.Features = None
    model: opt.Model = None
    epsilon: opt.Epsilon = 3.0
    delta: opt.Delta = DEFAULT_DELTA
    device: opt.Device = None
    run_dir: opt.RunDir = None
    seed: opt.Seed = None
    quiet: opt.Quiet = False
    as_json: opt.AsJson = False

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {"--target": self.target, "--schema": self.schema, "--test-data": self.test_data}
        passed = [name for name, value in own.items() if value]
        if not opt.is_file(self.data):
            if passed:
                text = f"{passed[0]} is an option of --data FILE, but {self.data} is a named data set."
                raise InvalidValue(f"{text} Pass the path of a file, or leave {passed[0]} out.")
            return
        if not self.target:
            raise InvalidValue(f"--target is missing: name the column of {self.data} to predict.")
        if self.schema is None:
            raise InvalidValue(
                f"--schema is missing: bounds and categories learned from the records of {self.data} "
                "would reveal them. `hush schema PUBLIC-FILE > schema.toml` drafts a schema to edit."
            )
        if self.features is not None:
            raise InvalidValue("--features is an option of named data sets. Leave it out.")
        for path in (Path(self.data), *([self.test_data] if self.test_data else [])):
            if not path.exists():
                raise DataError(f"{path} does not exist. Pass the path of a file.")
        if self.test_data is not None and self.test_data.samefile(self.data):
            raise DataError(
                "--test-data is the training data, and evaluation is not charged. Pass other records."
            )

    def plain_schema(self) -> dict[str, Any] | None:
        """Read the schema file as plain data."""
        if self.schema is None:
            return None
        return {name: column.to_plain() for name, column in read_schema(self.schema).items()}


@dataclass(frozen=True, kw_only=True)
class Run(Training):
    noise: opt.Noise = None
    clip: Annotated[float | None, opt.privacy("Clipping norm; by default 1, or as in the plan.")] = None
    plan: opt.PlanName = None
    bands: Annotated[int | None, opt.privacy("Number of steps with correlated noise.")] = None
    beta: Annotated[float | None, opt.privacy("Exponent of the noise of a named plan.")] = None
    coordinate_rate: Annotated[float | None, opt.privacy("Coordinate rate, rounded to n/256.")] = None
    cap: Annotated[float | None, opt.privacy("Bound on each entry, in units of --clip.")] = None
    linf: Annotated[float | None, opt.privacy("l-infinity clipping norm, for bounded support.")] = None
    bound: Annotated[float | None, opt.privacy("Bound on the noise of a named plan / its scale.")] = None
    units: opt.UnitsFile = None
    per_unit: Annotated[int | None, opt.privacy("Maximum records of one user per step.")] = None
    neighbours: opt.AdjacencyOption = None
    records: Annotated[int | None, opt.privacy("Public size estimate, for add/remove.")] = None
    public_records: Annotated[int, opt.privacy("Number of public, unprotected training records.")] = 0
    learning_rate: Annotated[float | None, opt.training(_RATE, "--lr")] = None
    momentum: Annotated[float, opt.training("Momentum of SGD.")] = 0.0
    physical_batch: Annotated[int | None, opt.training("Physical batch: records in memory.")] = None
    test_batch: Annotated[int | None, opt.testing("Expected batch size of the acceptance test.")] = None
    test_noise: Annotated[float | None, opt.testing("Noise multiplier of the acceptance test.")] = None
    test_clip: Annotated[float | None, opt.testing("Clipping bound on the change of a loss.")] = None
    test_threshold: Annotated[float | None, opt.testing("Threshold / --test-clip; default -1.")] = None
    test: Annotated[Test | None, opt.testing("Test statistic; by default as in the plan.")] = None
    per_instance: Annotated[int | None, opt.running(_WATCHED)] = None
    resume: opt.Resume = False
    reseed: Annotated[bool, opt.running("Resume with new randomness and new charges.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        opt.reject_together(clip=self.clip, linf=self.linf)
        if (self.units is None) != (self.per_unit is None):
            raise InvalidValue(
                "--units FILE has the user id of each record, and --per-unit N limits the records of "
                "one user per step. Pass both, e.g. with --per-unit 1, or neither."
            )

    def hyperparameters(self) -> dict[str, Any]:
        """Values by option name; an example rate represents a batch size."""
        values = {name: getattr(self, name.replace("-", "_"), None) for name in opt.HYPERPARAMETERS}
        batches = {"rate": self.batch_size, "test-rate": self.test_batch}
        return values | {name: 1e-6 for name, size in batches.items() if size is not None}

    def private_plan(self, units: int, unit: str, dimension: int) -> Plan:
        """Plan for this number of records or users, before its noise is calibrated."""
        values, size, test = self.hyperparameters(), self.batch_size, self.test_batch
        if self.plan is not None:
            if size is not None:
                values["rate"] = opt.share_of("--batch-size", size, units, unit)
            if test is not None:
                values["test-rate"] = opt.share_of("--test-batch", test, units, unit)
            sizes = {"parameters": dimension, "public": self.public_records, "momentum": self.momentum}
            plan = opt.plan_at(self.plan, values, **sizes)
            if len(plan.noise.correlation) == 1 or not opt.is_named(self.plan):
                return plan
            return opt.plan_at(self.plan, values, **sizes, steps=self.count(plan, _EPOCHS))
        size = min(256, units) if size is None else size
        sampling = opt.sampling_of(self.rate, units, size, unit)
        return opt.plan_of(sampling, self.noise, self.clip)

    def settings(self, model: str) -> Settings:
        same = {each.name: getattr(self, each.name) for each in fields(Settings)}
        same["schema"] = schema = self.plain_schema()
        if self.learning_rate is None:
            kinds = [schema.get(name, {}).get("kind") for name in self.target or ()] if schema else []
            same["learning_rate"] = 0.1 if "Numeric" in kinds else 1.0
        if self.neighbours is Neighbours.ZERO_OUT:  # equal to the settings without --neighbours
            same["neighbours"] = None
        return Settings(**same | {"model": model})


@opt.takes(Run)
def train(asked: Run) -> None:
    """Train a model with differential privacy, by default on the bundled digits.

    Without --noise, hush calibrates the noise to the budget. A named plan has its own sampling rate and
    clipping norm. The noise of a plan file is not calibrated. Without --steps or --epochs, a plan file
    runs until the budget is spent.

    Example: hush train --epsilon 3 --epochs 20 --lr 1

    A method of a paper: hush train --plan dpsur --epsilon 3 --epochs 20
    """
    import torch

    from hush.accounting.calibrate import calibrate, fit_noise
    from hush.accounting.mechanism import grows_with_dimension
    from hush.accounting.planning import low_snr_warning
    from hush.training.data import count
    from hush.training.loop import train as run_loop
    from hush.training.options import Checkpoints, Execution, Logging, Randomness
    from hush.training.run_folder import check_settings

    budget = Budget(epsilon=asked.epsilon, delta=asked.delta)
    folder = folder_of(asked.run_dir, Path(asked.data).stem)
    seed = asked.seed
    if asked.plan is not None:  # check before computing features, which takes minutes
        clipping = opt.plan_at(asked.plan, asked.hyperparameters()).clipping
        if isinstance(clipping, Subspaces) and clipping.bases is not None and not asked.public_records:
            raise InvalidPlan(
                f"--plan {asked.plan} clips in subspaces of public gradients, but no record is public. "
                "Pass e.g. --public-records 100: the first 100 training records are not protected."
            )
    for name, value in asked.hyperparameters().items():
        if asked.plan is None and value is not None and name not in ("rate", "clip", "noise"):
            option = name.replace("test-rate", "test-batch")
            text = (
                f"--{option} is an option of named plans. Pass --plan as well; `hush plans` lists them."
            )
            raise InvalidValue(text)
    settings = asked.settings(
        experiments.model_of(asked.model, asked.data, asked.features, asked.plain_schema())
    )
    if asked.resume and (folder / "plan.toml").exists():
        check_settings(folder, settings.to_plain())
    device = opt.device_of(asked.device)
    experiment = build_experiment(settings, asked.data_dir, device, asked.units, asked.test_data)
    units = experiment.public_count()
    generator = None
    if seed is not None:
        torch.manual_seed(seed)
        generator = torch.Generator(device).manual_seed(seed)
    network, optimizer = experiment.initialise()
    dimension = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    if device.type == "cpu" and dimension < 10_000 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # faster than several threads
    private = asked.private_plan(units, "record" if asked.units is None else "owner", dimension)
    from_file = asked.plan is not None and not opt.is_named(asked.plan)
    find: Any = calibrate
    if isinstance(private.clipping, Subspaces) and not from_file:
        find = fit_noise
        private = replace(private, clipping=_public_clipping(private.clipping, experiment))
    if isinstance(ball := private.clipping, L2Linf) and ball.linf >= ball.l2:
        print_error(
            f"entries are at most {ball.l2:g} by --clip, so a cap of {ball.linf:g} has no effect"
        )
    steps = None
    if not from_file or asked.steps is not None or asked.epochs is not None:
        steps = asked.count(private, _EPOCHS)
    if not from_file and asked.noise is None and steps is not None:
        adjacency = Adjacency(neighbours=settings.relation)
        charged = dimension if grows_with_dimension(private) else None
        private = find(private, budget, steps, charged, adjacency=adjacency)
    if steps and (low := low_snr_warning(private, units, steps, dimension)):
        print_error(low)
    watched = _watched(asked.per_instance, private, experiment.slots)
    checkpoints = Checkpoints(
        directory=folder, resume=asked.resume, reseed=asked.reseed, settings=settings.to_plain()
    )
    try:
        run = run_loop(
            *(network, experiment.loss, optimizer, private, experiment.train),
            budget=budget,
            steps=steps,
            evaluation=experiment.test,
            checkpoints=checkpoints,
            randomness=Randomness(generator=generator),
            execution=Execution(physical_batch=asked.physical_batch),
            records=asked.records,
            units=experiment.units,
            neighbours=settings.relation,
            public=experiment.public,
            per_instance=watched,
            logging=Logging(progress=not asked.quiet),
        )
    except KeyboardInterrupt:
        if (folder / "plan.toml").exists():
            print_error(f"stopped; continue with the same command and --run-dir {folder} --resume")
        raise
    final = run.metrics[-1]
    lines = [f"{asked.data}: no accuracy without --test-data; {counted(run.steps, 'step')}"]
    if experiment.test is not None:
        accuracy = f"accuracy {final['accuracy']:.2%}, " if "accuracy" in final else ""
        tested = counted(count(experiment.test), "test record")
        lines = [
            f"{asked.data}: {accuracy}loss {final['loss']:.4f} on {tested} after "
            f"{counted(run.steps, 'step')}"
        ]
    rates = f"learning rate {settings.learning_rate:g}, momentum {asked.momentum:g}"
    if run.accepted is None:
        published = isinstance(private.release, Selective)
        unit = "accepted update" if published else "step"
        lines.append(f"{counted(run.steps, unit)} of {private}, {rates}")
    else:
        lines.append(f"{counted(run.steps, 'trial')}, {run.accepted} accepted, of {private}, {rates}")
    lines += _sizes(private, counted(units, "record" if asked.units is None else "user"), units)
    if asked.plan and not from_file and asked.rate is asked.batch_size is None:
        lines[-1] += " (at the rate of the paper; --batch-size changes it)"
    lines.append(str(run.guarantee))
    if asked.public_records:
        public = counted(asked.public_records, "public one")
        lines.append(f"the guarantee is for the private records; {public} have no protection")
    if from_file and run.stopped != "budget" and (spent := float(run.guarantee)) < 0.95 * asked.epsilon:
        way = f"hush calibrate --plan {asked.plan} --epsilon {asked.epsilon:g} --delta {asked.delta:g}"
        lines.append(
            f"the noise of {asked.plan} spends {at_most(spent)} of epsilon {asked.epsilon:g}: "
            f"`{way} --steps {run.steps}` finds the noise that spends it all"
        )
    elif not from_file and asked.noise is None and float(run.guarantee) < 0.95 * asked.epsilon:
        lines.append(
            "epsilon jumps at this noise multiplier: a smaller multiplier would exceed the budget"
        )
    if run.stopped == "budget":
        lines.append("stopped early: another step would exceed the budget")
    if watched is not None:
        size = sum(parameter.numel() for parameter in network.parameters())
        lines += _per_instance(watched, private, run.steps, asked.delta, size)
    elif isinstance(private.noise, _BOUNDED) and not isinstance(private.sampling, FullBatch):
        lines.append("no per-instance epsilon: it needs full batches. Leave out --rate and --batch-size")
    if run.guarantee.arithmetic == "assumed" and isinstance(private.noise, Truncated):
        lines.append("arithmetic: assumed, because truncated noise is drawn in double precision")
    if run.skipped:
        lines.append(
            f"records skipped because their gradients were not finite: {run.skipped} "
            "(sensitive; not in any published file)"
        )
    lines.append(f"weights to publish: {folder / 'model.safetensors'}; ledger and metrics are beside it")
    facts = {"steps": run.steps, "accepted": run.accepted, "stopped": run.stopped, "final": final}
    facts["plan"] = private.to_plain()
    print_run(run.guarantee, facts, lines, seed=seed, folder=folder, as_json=asked.as_json)


@opt.takes(Training)
def tune(
    asked: Training,
    learning_rate: Annotated[str, _search(f"Learning rate: {_RANGE}.", "--lr")] = "0.1:10",
    clip: Annotated[str, _search(f"Clipping norm: {_RANGE}.")] = "0.1:10",
    momentum: Annotated[str, _search("Momentum of SGD: a number or a list.")] = "0",
    trials: Annotated[float, _search("Expected number of trials.")] = 10.0,
    held_out: Annotated[int | None, _search("Records held out for scoring; 0: test records.")] = None,
) -> None:
    """Tune hyperparameters by private random search; the budget covers all trials.

    Only the best trial is released. The other trials, their number and their run times are secret.

    Example: hush tune --lr 0.3:10 --clip 0.3,1,3 --epochs 10
    """
    import torch

    from hush.training.evaluate import evaluate
    from hush.training.loop import train as run_loop
    from hush.training.options import Randomness
    from hush.training.run_folder import SETTINGS, metrics_line, metrics_of
    from hush.training.tune import tune as run_tune

    MEAN["range"].check("--trials", trials)
    folder = folder_of(asked.run_dir, f"{Path(asked.data).stem}-tuned")
    space = {
        "learning_rate": _dimension("--lr", learning_rate, experiments.LEARNING_RATE),
        "clip": _dimension("--clip", clip, _CLIP),
        "momentum": _dimension("--momentum", momentum, experiments.MOMENTUM),
    }
    plain = asked.plain_schema()
    settings = Settings(
        data=asked.data,
        target=None if asked.target is None else tuple(asked.target),
        schema=plain,
        model=experiments.model_of(asked.model, asked.data, asked.features, plain),
        delta=asked.delta,
        learning_rate=1.0,
        features=asked.features,
    )
    device, test = opt.device_of(asked.device), asked.test_data
    experiment = build_experiment(settings, asked.data_dir, device, test_data=test)
    inputs, labels, *tests = experiment.tensors("hush tune")
    scored = max(1, len(labels) // 10) if held_out is None else held_out
    if check_count("--held-out", scored, "the score is a mean over them", 0) >= len(labels):
        raise InvalidValue(
            f"--held-out {scored} must be below the {counted(len(labels), 'training record')}: the "
            f"other records train the model. Pass e.g. --held-out {max(1, len(labels) // 10)}."
        )
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
        network, optimizer = replace(experiment, settings=own).initialise()
        run_loop(
            *(network, loss, optimizer, trial.plan, (inputs[scored:], labels[scored:])),
            budget=trial.budget,
            steps=trial.steps,
            ledger=trial.ledger,
            randomness=Randomness(generator=generator),
        )
        if not scored:
            return network, evaluate(network, loss, (tests[0], tests[1]))["accuracy"]
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
        generator=None if asked.seed is None else torch.Generator().manual_seed(asked.seed),
        progress=not asked.quiet,
    )
    final = evaluate(tuned.model, loss, (tests[0], tests[1]))
    searched = {"learning_rate": learning_rate, "clip": clip, "momentum": momentum, "held_out": scored}
    stored, line = {**settings.to_plain(), **searched}, metrics_of(1, tuned.guarantee, **final)
    replace_file(folder / SETTINGS, f"{json.dumps(stored)}\n".encode())
    replace_file(folder / "metrics.jsonl", metrics_line(line).encode())
    best = ", ".join(f"{name} {value:.4g}" for name, value in tuned.settings.items())
    kind = "noisy accuracy on held-out private records" if scored else "accuracy on the test records"
    lines = [
        f"{asked.data}: {best}; {kind} {tuned.score:.2%}",
        f"accuracy {final['accuracy']:.2%} on {counted(len(tests[1]), 'test record')}",
        f"{tuned.guarantee}, of the whole search",
    ]
    if not scored:
        lines.append("the test records chose the hyperparameters: their accuracy is biased upward")
    lines.append(
        f"weights to publish: {folder / 'model.safetensors'}; ledger and settings are beside it"
    )
    facts = {"settings": tuned.settings, "score": tuned.score, "final": final}
    facts["plan"] = tuned.plan.to_plain()
    print_run(tuned.guarantee, facts, lines, seed=asked.seed, folder=folder, as_json=asked.as_json)


def _public_clipping(clipping: Subspaces, experiment: "experiments.Experiment") -> Subspaces:
    """Clipping with norms in proportion to the norms of public gradients.

    The gradients are at the initial weights of a fixed seed, so a resumed run computes the same norms.
    """
    import torch

    from hush.training.methods.public_bases import public_thresholds

    public, bases, subspaces = experiment.public, clipping.bases, len(clipping.ranks) - 1
    assert public is not None
    assert bases is not None
    if subspaces < 4 and (records := len(public[1])) < 22:  # the paper's smallest relative rank is 1/13
        print_error(
            f"{counted(records, 'public record')} span {subspaces} of the paper's 4 subspaces. Pass "
            "e.g. --public-records 100."
        )
    with torch.random.fork_rng([] if experiment.device.type == "cpu" else [experiment.device]):
        torch.manual_seed(0)
        network, _ = experiment.initialise()
    norm = clipping.reference_norm
    found = public_thresholds(
        network, experiment.loss, public, ranks=clipping.ranks, norm=norm, bases=bases
    )
    return replace(clipping, l2=[float(f"{norm:.3g}") for norm in found.l2])


def _sizes(plan: Plan, records: str, count: int) -> Iterator[str]:
    """Lines about the noise per block and the expected batch sizes of a plan."""
    if isinstance(plan.clipping, Subspaces):
        blocks = plan.clipping.sensitivity(None)
        noises = plan.noise.per_block(blocks, plan.clipping.reference_norm)
        scales = [float(noise.to_plain()["multiplier"] * norm) for noise, norm in noises]
        yield (
            "standard deviation of the noise in each subspace and the residual: "
            f"{', '.join(f'{scale:.3g}' for scale in scales)}; {_variance_ratio(blocks, scales):.0%} of "
            "the variance of isotropic noise"
        )
    tests = (
        f", test batch {plan.release.rate * count:.3g}" if isinstance(plan.release, Selective) else ""
    )
    yield f"expected batch {plan.sampling.average_participation * count:.4g} of {records}{tests}"


def _variance_ratio(blocks: Sequence[SensitivitySet], scales: Sequence[float]) -> float:
    """Total variance relative to isotropic noise of equal privacy, without coordinate sampling."""
    lengths, sizes = [block.l2_radius for block in blocks], [block.dimension or 1 for block in blocks]
    loss = sum((length / scale) ** 2 for length, scale in zip(lengths, scales, strict=True))
    isotropic = sum(length**2 for length in lengths) / loss
    shaped = sum(size * scale**2 for size, scale in zip(sizes, scales, strict=True))
    return shaped / (isotropic * sum(sizes))


def _watched(count: int | None, plan: Plan, slots: int) -> "PerInstance | None":
    """Accumulator for the first records; by default only for full batches with bounded noise."""
    from hush.training.per_instance import PerInstance

    if count is None:
        bounded = isinstance(plan.noise, _BOUNDED)
        count = 100 if bounded and isinstance(plan.sampling, FullBatch) else 0
    count = check_count("--per-instance", count, "they are counted", at_least=0)
    return PerInstance(slots=range(min(count, slots)), iterations=64) if count else None


def _per_instance(
    watched: "PerInstance", plan: Plan, steps: int, delta: float, dimension: int
) -> list[str]:
    """Lines about the per-instance costs, with definitions and the worst case."""
    from hush.accounting.epsilon import epsilon
    from hush.accounting.rdp.conversion import rdp_to_epsilon

    orders, error = len(watched.orders), watched.eigenvalue_error
    any_data = at_most(rdp_to_epsilon(watched.worst_case, watched.orders, delta), 3)
    gaussian = plan.noise.dominating_noise(plan.clipping.reference_norm) or plan.noise
    usual = float(epsilon(replace(plan, noise=gaussian), steps, delta, dimension=dimension))
    looseness = f" (loose by up to {100 / math.sqrt(1 - error) - 100:.2g}%)" if error else ""
    return [
        f"sensitive, of {counted(len(watched.charges), 'watched record')}, not for publication (in "
        "private/per_instance.npz):",
        f"  per-instance epsilon at delta {delta:g}, each record present or absent: "
        f"{_quantiles(watched.epsilons(delta))}",
        '  per-instance epsilon of any record, the paper\'s "for all": at most '
        f"{at_most(watched.any_record_epsilon(delta), 3)}",
        f"  any records in any data, by the same {orders} Rényi orders: at most {any_data}",
        f"  Gaussian noise of the same scale, for comparison: at most {at_most(usual, 3)}",
        f"  Fisher information loss, at most{looseness}: {_quantiles(watched.losses())}",
        "  costs of the steps of this run, at its own weights; its guarantee is the epsilon above",
    ]


def _quantiles(values: Any) -> str:
    import numpy as np

    least, median, most, largest = np.quantile(values, [0.0, 0.5, 0.9, 1.0])
    counts = " ".join(map(str, np.histogram(values, 10)[0]))
    return (
        f"least {least:.3g}, median {median:.3g}, 90% {most:.3g}, largest {largest:.3g}; "
        f"records in ten bins of equal width from least to largest: {counts}"
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
        raise InvalidValue(f"{option} {text} must be {_RANGE}.")
    return LogUniform(numbers[0], numbers[1])
