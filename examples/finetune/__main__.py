"""`python -m examples.finetune`: fine-tune a pretrained text encoder on private reviews."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import typer

import hush
from examples.finetune.classifier import load_adapter, load_encoder
from examples.finetune.experiment import Experiment, Outcome
from examples.finetune.reviews import read_reviews, save_reviews
from examples.finetune.search import HELD_OUT, Log, search
from examples.finetune.training import Settings, accuracy
from hush.cli.options import device_of
from hush.cli.output import run_app
from hush.core.atomic_files import check_folder
from hush.core.errors import InvalidValue
from hush.core.value import Range

START = Settings(learning_rate=0.003, batch=2048, steps=64)
"""Where the search for settings begins."""
PRIVATE = Settings(
    learning_rate=0.0025,
    batch=4096,
    steps=48,
    clip=1.0,
    alpha=128.0,
    targets=("query", "value", "dense"),
    head_rate=4.0,
    first=64,
    warmup=8,
)
PLAIN = Settings(learning_rate=0.001, batch=256, steps=400, warmup=20)
FROZEN = Settings(learning_rate=0.1, batch=4096, steps=64, head_scale=5.0, clip=1.0)
DELTA = 1e-5

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[Path, typer.Option(help="Folder of the pretrained encoder: public.")]
ReviewFile = Annotated[Path | None, typer.Option(help="File of `prepare`; else HUSH_DATA.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
Seconds = Annotated[float, typer.Option(help="No further run begins after so many.")]
Out = Annotated[Path, typer.Option(help="Folder for the results.")]
Override = Annotated[str, typer.Option(help="Settings as JSON, in place of the defaults.")]


Run = Callable[[Settings, hush.Budget | None, int | None], Outcome]


def _settings(defaults: Settings, text: str) -> Settings:
    """The settings with those that are given in place of theirs, of the same kinds."""
    names = asdict(defaults)
    try:
        values = json.loads(text)
    except ValueError as error:
        values = error
    if not isinstance(values, dict):
        raise InvalidValue(
            f"settings {text!r} must be a JSON object, not {values}: pass e.g. '{{\"steps\": 64}}'."
        )
    wrong = [name for name in values if name not in names or not _like(values[name], names[name])]
    if wrong:
        raise InvalidValue(
            f"settings {', '.join(map(repr, wrong))} are not of the names and kinds that there are: "
            f"{json.dumps(names)}."
        )
    if "targets" in values:
        values["targets"] = tuple(values["targets"])
    return replace(defaults, **values)


def _like(value: object, example: object) -> bool:
    """Whether a value from JSON can take the place of an example; an integer is a number too."""
    if isinstance(example, bool) or isinstance(value, bool):
        return isinstance(example, bool) and isinstance(value, bool)
    if isinstance(example, tuple):
        return isinstance(value, list) and all(isinstance(part, str) for part in value)
    return isinstance(value, int | float if isinstance(example, float) else type(example))


def _read(model: Path, reviews: Path | None, device: str, out: Path) -> Experiment:
    """Everything from disk, after a check that results can be written."""
    check_folder("--out", out)
    return Experiment.read(model, reviews, str(device_of(device)))


def _end(seconds: float) -> float:
    allowed = Range(at_least=0, why="it is a time to work", example=600)
    return time.perf_counter() + allowed.check("--seconds", seconds)


def _say_what_is_private(experiment: Experiment) -> None:
    print(
        "public: the pretrained encoder, its tokenizer, and the reviews to evaluate on\n"
        f"private: {len(experiment.train)} reviews to train on; the guarantee is for one of them",
        flush=True,
    )


@app.command()
def train(
    model: Model,
    out: Out = Path("runs/finetune"),
    epsilon: Annotated[float, typer.Option(help="Privacy budget.")] = 3.0,
    delta: Annotated[float, typer.Option(help="Privacy budget.")] = DELTA,
    reviews: ReviewFile = None,
    device: Device = "cpu",
    settings: Override = "{}",
) -> None:
    """Train a LoRA and a head with differential privacy; save the adapter in PEFT's format."""
    chosen, budget = _settings(PRIVATE, settings), hush.Budget(epsilon=epsilon, delta=delta)
    experiment = _read(model, reviews, device, out)
    without_privacy, head = (
        replace(
            other,
            batch=min(other.batch, len(experiment.train)),
            targets=chosen.targets,
            length=chosen.length,
            first=chosen.first,
        )
        for other in (PLAIN, FROZEN)
    )
    experiment.check(chosen, without_privacy, head)
    _say_what_is_private(experiment)
    outcome = experiment.run(chosen, budget, None)
    print(f"private: {outcome.accuracy:.2f} % right, {outcome.guarantee}", flush=True)
    outcome.model.save_pretrained(out)
    plain = experiment.run(without_privacy, None, 0)
    print(f"not private: {plain.accuracy:.2f} % right")
    frozen = experiment.run_frozen(head, budget, None)
    print(f"head on frozen features, private: {frozen.accuracy:.2f} % right")
    print(f"adapter: {out}")


@app.command()
def prepare(model: Model, out: Out = Path("data/finetune")) -> None:
    """Write the tokenized reviews for a machine without the published files."""
    check_folder("--out", out)
    _, tokenizer = load_encoder(model)
    save_reviews(out / "reviews.npz", *read_reviews(tokenizer))


@app.command()
def validate(
    model: Model,
    reviews: ReviewFile = None,
    device: Device = "cpu",
    seconds: Seconds = 1e9,
    out: Out = Path("runs/finetune"),
    settings: Override = "{}",
    plain: Override = "{}",
    frozen: Override = "{}",
    held_out: Annotated[int, typer.Option(help="Training reviews to evaluate on.")] = HELD_OUT,
    epsilon: Annotated[float, typer.Option(help="Privacy budget of each run.")] = 3.0,
) -> None:
    """Choose settings on held-out training reviews, one run after another."""
    end = _end(seconds)
    start, without_privacy = _settings(START, settings), _settings(PLAIN, plain)
    head_alone, budget = _settings(FROZEN, frozen), hush.Budget(epsilon=epsilon, delta=DELTA)
    experiment = _read(model, reviews, device, out).held_out(held_out)
    experiment.check(start, without_privacy, head_alone)
    print(
        f"{len(experiment.train)} reviews to train on; evaluated on {held_out} of the private reviews: "
        "what is printed here is not charged",
        flush=True,
    )
    log = Log(out / "validate.jsonl", end)
    best = search(experiment, start, budget, log)
    print("best", json.dumps(asdict(best)), flush=True)
    for rate in (0.03, 0.1, 0.3):
        if log.time_left():
            head = replace(head_alone, learning_rate=rate)
            outcome = experiment.run_frozen(head, budget, 0)
            log.add(f"frozen, rate {rate:g}", head, outcome, epsilon=epsilon)
    for rate in (0.001, 0.003):
        if log.time_left():
            other = replace(without_privacy, learning_rate=rate)
            log.add(f"not private, rate {rate:g}", other, experiment.run(other, None, 0))


@app.command()
def final(
    model: Model,
    reviews: ReviewFile = None,
    device: Device = "cpu",
    seconds: Seconds = 1e9,
    out: Out = Path("runs/finetune"),
    seeds: Annotated[int, typer.Option(help="Runs of each kind.", min=1)] = 5,
) -> None:
    """Train on all training reviews and evaluate on the test reviews: three epsilons, several seeds."""
    log = Log(out / "final.jsonl", _end(seconds))
    experiment = _read(model, reviews, device, out)
    experiment.check(PRIVATE, PLAIN, FROZEN)
    _say_what_is_private(experiment)
    _, test = experiment.data(PRIVATE)
    print(f"not trained at all: {accuracy(experiment.classifier(PRIVATE), test):.2f} %", flush=True)
    accuracies: dict[str, list[float]] = {}

    def note(name: str, run: Run, settings: Settings, epsilon: float | None, seed: int) -> None:
        if not log.time_left():
            print(f"{name}, seed {seed}: no time left", flush=True)
            return
        budget = None if epsilon is None else hush.Budget(epsilon=epsilon, delta=DELTA)
        outcome = run(settings, budget, seed)
        log.add(name, settings, outcome, seed=seed)
        accuracies.setdefault(name, []).append(outcome.accuracy)
        if name == "private, epsilon 3" and seed == 0:
            outcome.model.save_pretrained(out / "adapter")
            again = load_adapter(experiment.classifier(settings), out / "adapter").to(experiment.device)
            print(f"  adapter saved and loaded: {accuracy(again, test):.2f} %", flush=True)

    def note_private(epsilon: float, seed: int) -> None:
        note(f"private, epsilon {epsilon:g}", experiment.run, PRIVATE, epsilon, seed)

    # what is asked for most comes first, in case that time runs out
    for epsilon in (3.0, 1.0, 8.0):
        note_private(epsilon, 0)
    note("not private", experiment.run, PLAIN, None, 0)
    for seed in range(seeds):
        for epsilon in (1.0, 3.0, 8.0):
            note(f"frozen, epsilon {epsilon:g}", experiment.run_frozen, FROZEN, epsilon, seed)
        note("frozen, not private", experiment.run_frozen, FROZEN, None, seed)
    for epsilon in (3.0, 1.0, 8.0):
        for seed in range(1, seeds):
            note_private(epsilon, seed)
    for seed in range(1, seeds):
        note("not private", experiment.run, PLAIN, None, seed)
    for name, values in accuracies.items():
        spread = stdev(values) if len(values) > 1 else 0.0
        print(f"{name:<24} {mean(values):6.2f} +- {spread:.2f} % ({len(values)} runs)", flush=True)


if __name__ == "__main__":
    run_app(app)
