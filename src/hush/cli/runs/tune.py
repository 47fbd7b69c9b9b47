"""`hush tune`: learning rate, clipping norm and momentum by private selection, all of it charged."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

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
    Model,
    Quiet,
    Rate,
    Resume,
    RunDir,
    Seed,
    Steps,
    device_of,
    one_of,
    plan_of,
    refuse_together,
    sampling_of,
    steps_of,
)
from hush.cli.output import SEED_NOTICE, counted, print_json
from hush.cli.runs.experiment import (
    LEARNING_RATE,
    MOMENTUM,
    Experiment,
    Settings,
    build_experiment,
    new_folder,
)
from hush.clipping import L2
from hush.core.atomic_files import replace_file
from hush.core.best_of import MEAN, TrialLaw
from hush.core.errors import InvalidValue
from hush.core.guarantee import Budget, Guarantee
from hush.core.plan import Plan
from hush.core.value import Range, check_count
from hush.training.options import Randomness

if TYPE_CHECKING:
    from torch import nn

    from hush.training.tuning.space import Dimension
    from hush.training.tuning.trial import TuningTrial

_CLIP = Range(above=0, at_most=1e15, why="no noise hides a record without a bound on it", example=1.0)
_RANGE = "one number, several as 0.5,1,2, or a range as 0.1:10 (uniform in the logarithm)"


def tune(
    data: Data = "digits",
    data_dir: DataDir = None,
    features: Features = None,
    model: Model = None,
    epsilon: Epsilon = 3.0,
    delta: Delta = 1e-5,
    rate: Rate = None,
    batch_size: BatchSize = None,
    steps: Steps = None,
    epochs: Epochs = None,
    learning_rate: Annotated[str, typer.Option("--lr", help=f"Learning rates: {_RANGE}.")] = "0.1:10",
    clip: Annotated[str, typer.Option(help=f"Clipping norms: {_RANGE}.")] = "0.1:10",
    momentum: Annotated[
        str, typer.Option(help="Momentum of SGD: one number, or several as 0,0.9.")
    ] = "0",
    adam: Annotated[bool, typer.Option("--adam", help="Adam instead of SGD.")] = False,
    trials: Annotated[float, typer.Option(help="Expected number of trials.")] = 10.0,
    law: Annotated[
        str,
        typer.Option(
            help="Law of the number of trials: negative-binomial or poisson.",
            callback=one_of(
                "--law", "negative-binomial", "poisson", why="a fixed number costs many times as much"
            ),
        ),
    ] = "negative-binomial",
    shape: Annotated[
        float, typer.Option(help="Shape of the negative binomial: 0 logarithmic, 1 geometric.")
    ] = 1.0,
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Private training records held out for scores, a tenth by default; 0: scores on the "
            "test records, which have no protection."
        ),
    ] = None,
    score_noise: Annotated[
        float, typer.Option(help="Noise multiplier of the number of right held-out records.")
    ] = 10.0,
    device: Device = None,
    run_dir: RunDir = None,
    resume: Resume = False,
    seed: Seed = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Choose settings by private random search: the budget covers all trials, and the best is released.

    The number of trials, the time they took and all but the best of them stay secret.
    """
    import torch

    from hush.models import default_model
    from hush.training.evaluate import evaluate
    from hush.training.tuning.tune import tune as run_tune

    refuse_together(rate=rate, batch_size=batch_size)
    refuse_together(steps=steps, epochs=epochs)
    budget = Budget(epsilon=epsilon, delta=delta)
    MEAN["range"].check("--trials", trials)
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
        adam=adam,
        features=features,
    )
    experiment = build_experiment(settings, data_dir, device_of(device))
    records = len(experiment.train[1])
    scored = max(1, records // 10) if held_out is None else held_out
    if check_count("--held-out", scored, "held-out records are counted", 0) >= records:
        raise InvalidValue(
            f"--held-out {scored} must be below the {counted(records, 'training record')}: someone is "
            f"to be learned from. Pass e.g. --held-out {max(1, records // 10)}."
        )
    training = replace(experiment, train=(experiment.train[0][scored:], experiment.train[1][scored:]))
    size = batch_size if batch_size is not None else min(256, records - scored)
    private = plan_of(sampling_of(rate, records - scored, size), 1.0)
    fit = _Fit(training, (experiment.train[0][:scored], experiment.train[1][:scored]), scored == 0)
    folder = run_dir or new_folder(f"{data}-tuned")
    tuned = run_tune(
        fit,
        space,
        plan=_clipped(private),
        steps=steps_of(steps, 20 if epochs is None else epochs, private),
        budget=budget,
        mean=trials,
        law=cast(TrialLaw, law),
        shape=shape,
        score_noise=score_noise if scored else None,
        directory=folder,
        resume=resume,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
        progress=not quiet,
    )
    final = evaluate(tuned.model, torch.nn.CrossEntropyLoss(), experiment.test)
    searched = {"learning_rate": learning_rate, "clip": clip, "momentum": momentum}
    _write_search(folder, settings, {**searched, "held_out": scored}, tuned.guarantee, final)
    if as_json:
        print_json(
            {
                "guarantee": tuned.guarantee.to_plain(),
                "settings": tuned.settings,
                "score": tuned.score,
                "final": final,
                "plan": tuned.plan.to_plain(),
                "seeded": seed is not None,
                "directory": str(folder),
            }
        )
        return
    chosen = ", ".join(f"{name} {value:.4g}" for name, value in tuned.settings.items())
    kind = "noisy accuracy on held-out private records" if scored else "accuracy on the test records"
    print(f"{data}: {chosen}; {kind} {tuned.score:.2%}")
    print(f"accuracy {final['accuracy']:.2%} on {counted(len(experiment.test[1]), 'test record')}")
    print(f"{tuned.guarantee}, of the whole search")
    if not scored:
        print("the test records chose the settings: their accuracy is not that on new records")
    if seed is not None:
        print(SEED_NOTICE)
    print(f"weights to publish: {folder / 'model.safetensors'}; the ledger and settings are beside it")


def _write_search(
    folder: Path,
    settings: Settings,
    searched: dict[str, Any],
    guarantee: Guarantee,
    measured: dict[str, float],
) -> None:
    """Put what was searched, and what the result scores on public records, beside the result."""
    from hush.training.run_folder import SETTINGS, metrics_line

    chosen = json.dumps({**settings.to_plain(), **searched}) + "\n"
    replace_file(folder / SETTINGS, chosen.encode())
    replace_file(folder / "metrics.jsonl", metrics_line(guarantee, 1, **measured).encode())


@dataclass(frozen=True)
class _Fit:
    """Trains one trial."""

    experiment: Experiment
    held_out: Any
    public: bool

    def __call__(self, chosen: dict[str, Any], trial: "TuningTrial") -> "tuple[nn.Module, float]":
        import torch

        from hush.training.evaluate import evaluate
        from hush.training.loop import train

        generator = None
        if trial.generator is not None:
            seed = trial.generator.initial_seed()
            torch.manual_seed(seed)
            generator = torch.Generator(self.experiment.train[0].device).manual_seed(seed)
        settings = replace(
            self.experiment.settings,
            learning_rate=chosen["learning_rate"],
            momentum=0.0 if self.experiment.settings.adam else chosen["momentum"],
        )
        model, optimizer = replace(self.experiment, settings=settings).initialise()
        loss = torch.nn.CrossEntropyLoss()
        train(
            model,
            loss,
            optimizer,
            trial.plan,
            self.experiment.train,
            budget=trial.budget,
            steps=trial.steps,
            ledger=trial.ledger,
            randomness=Randomness(generator=generator),
        )
        if self.public:
            return model, evaluate(model, loss, self.experiment.test)["accuracy"]
        inputs, labels = self.held_out
        model.eval()
        with torch.no_grad():
            right = torch.cat([model(part).argmax(1) for part in inputs.split(1024)]) == labels
        return model, trial.score(right.cpu())


def _clipped(private: Plan) -> Callable[[dict[str, Any]], Plan]:
    """The plan with the clipping norm of some settings."""
    return lambda chosen: replace(private, clipping=L2(norm=chosen["clip"]))


def _dimension(option: str, text: str, allowed: Range) -> "Dimension":
    """The range or choice that an option's text stands for."""
    from hush.training.tuning.space import Choice, LogUniform

    ends = text.split(":")
    try:
        numbers = [float(part) for part in (ends if len(ends) > 1 else text.split(","))]
    except ValueError:
        raise InvalidValue(f"{option} {text} must be {_RANGE}: what is searched is declared.") from None
    for number in numbers:
        allowed.check(option, number)
    if len(ends) == 1:
        return Choice(*numbers)
    if len(ends) > 2 or numbers[0] <= 0:
        raise InvalidValue(f"{option} {text} must be {_RANGE}: what is searched is declared.")
    return LogUniform(numbers[0], numbers[1])
