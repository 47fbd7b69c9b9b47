"""TrainingArguments of a private run: what they mean for a plan, and which of them are refused."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.utils.data import IterableDataset

from hush.accounting.calibrate import calibrate
from hush.clipping.norms import L2
from hush.core.errors import DataError, InvalidValue, Unsupported
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.value import check_kind, with_article
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.checks.disjoint import check_held_out

_FUSED_BACKWARD = ("lomo", "adalomo")
_LAYERWISE = "_layerwise"
_SHARE = 0.1
"""Of one over the number of records: the delta of a budget that names none."""

_STEP = ("training_step", "get_train_dataloader", "_get_train_sampler")
"""Methods of a Trainer that draw and apply gradients."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What a private run was asked for, beside its TrainingArguments."""

    epsilon: float | None
    delta: float | None
    plan: Plan | None

    def __post_init__(self) -> None:
        if self.plan is not None:
            check_kind("plan", self.plan, Plan)
        elif self.epsilon is None:
            raise InvalidValue(
                "neither epsilon nor plan was passed: without a limit there is no noise to add. Pass "
                "PrivateTrainer(..., epsilon=3.0), or plan= with noise of your own."
            )

    def delta_for(self, records: int) -> float:
        """Delta of the guarantee; where none was passed, a tenth of one over the number of records."""
        return _SHARE / records if self.delta is None else self.delta

    def budget(self, records: int) -> Budget | None:
        """Limit of everything on the ledger; None: the plan's steps are taken whatever they cost."""
        if self.epsilon is None:
            return None
        return Budget(epsilon=self.epsilon, delta=self.delta_for(records))

    def check(self, *, records: int, batch: int, clip_norm: float | None) -> None:
        """Raise where budget, plan and TrainingArguments cannot be those of one run.

        Args:
            records: number of slots.
            batch: expected logical batch: per device, times accumulation, times processes.
            clip_norm: `max_grad_norm`; None, as in Trainer: zero.
        """
        self.budget(records)
        if batch > records:
            raise InvalidValue(
                f"the batch of the TrainingArguments is {batch} (per device, times accumulation, times "
                f"processes) and there are {records} records: each takes part by chance, at a rate of "
                "at most 1. Lower per_device_train_batch_size or gradient_accumulation_steps."
            )
        if self.plan is not None:
            _check_agreeing(self.plan, records=records, batch=batch, clip_norm=clip_norm or 0.0)
        elif clip_norm is None or clip_norm <= 0:
            raise InvalidValue(
                f"max_grad_norm={clip_norm} must be > 0: it is the norm that each record's gradient is "
                "clipped to, and without a bound no noise gives privacy. Leave it at 1.0, or pass plan=."
            )

    def plan_for(self, *, records: int, batch: int, clip_norm: float | None, steps: int) -> Plan:
        """Plan of a run: the one that was passed, or noise calibrated to the budget.

        Args:
            records: number of slots.
            batch: expected logical batch: per device, times accumulation, times processes.
            clip_norm: `max_grad_norm`.
            steps: optimizer steps in all.
        """
        self.check(records=records, batch=batch, clip_norm=clip_norm)
        if self.plan is not None:
            return self.plan
        budget = self.budget(records)
        assert budget is not None
        assert clip_norm is not None
        plan = Plan(
            sampling=Poisson(rate=batch / records),
            clipping=L2(norm=clip_norm),
            noise=Gaussian(multiplier=1.0),
        )
        return calibrate(plan, budget, steps=steps)


def _check_agreeing(plan: Plan, *, records: int, batch: int, clip_norm: float) -> None:
    """Raise where a plan and TrainingArguments say different things."""
    expected = plan.sampling.expected(records)
    if abs(expected - batch) >= 0.5:
        raise InvalidValue(
            f"the plan draws {expected:g} of {records} records on average and the TrainingArguments say "
            f"{batch} (per device, times accumulation, times processes): one of them is not what runs. "
            f"Pass sampling=hush.Poisson(rate={batch} / {records}), or other arguments."
        )
    norm = getattr(plan.clipping, "norm", None)
    if clip_norm not in (0, norm):
        raise InvalidValue(
            f"max_grad_norm={clip_norm} and the plan clips each record's gradient by {plan.clipping}: "
            "a noisy gradient is not clipped again. Pass TrainingArguments(max_grad_norm=0), or the "
            "plan's norm."
        )


def check_arguments(args: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Raise for arguments that a private step cannot keep.

    Args:
        args: the TrainingArguments.
        train_dataset: the private records.
        eval_dataset: of the Trainer.
    """
    check_records(train_dataset)
    check_evaluation(eval_dataset, train_dataset)
    optimizer = str(_plain(args.optim))
    refused = {
        "fp16": args.fp16
        and "a gradient scaler multiplies losses, and private gradients are taken of none: use bf16",
        "deepspeed": args.deepspeed
        and "it computes, splits and applies gradients by itself, which are not clipped by record",
        "fsdp": args.fsdp
        and "it splits the weights by itself: use fully_shard in a loop of your own "
        "(docs/distributed.md)",
        "train_sampling_strategy": args.train_sampling_strategy != "random"
        and f"{args.train_sampling_strategy!r} picks records by their length or place, and what is "
        "charged is that each is drawn by a coin of its own",
        "auto_find_batch_size": args.auto_find_batch_size
        and "it takes steps again with another batch, which would be another plan",
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen != "no"
        and "the number of tokens in a batch depends on who was drawn",
        "neftune_noise_alpha": args.neftune_noise_alpha is not None
        and "its hook draws inside of the model, which was not tested here",
        "use_liger_kernel": args.use_liger_kernel
        and "its kernels compute gradients by themselves, and not of each record",
        "n_gpu": args.n_gpu > 1
        and "one process with several GPUs averages gradients before they are clipped: start it with "
        "torchrun, one process a GPU, or show it one GPU (CUDA_VISIBLE_DEVICES)",
        "optim": (optimizer in _FUSED_BACKWARD or optimizer.endswith(_LAYERWISE))
        and f"{optimizer} moves weights during the backward pass, before anything is charged",
    }
    for name, reason in refused.items():
        if reason:
            value = _plain(getattr(args, name))
            raise Unsupported(f"{name}={value!r} of the TrainingArguments cannot be private: {reason}.")


def _plain(value: Any) -> Any:
    """What was passed: TrainingArguments turn names into members of enumerations."""
    return value.value if isinstance(value, Enum) else value


def check_records(train_dataset: Any) -> None:
    """Raise for training records that no step can draw.

    Args:
        train_dataset: of the Trainer.
    """
    if train_dataset is None:
        raise InvalidValue(
            "train_dataset was not passed: the noise follows the number of private records. Pass "
            "train_dataset=...; to evaluate alone, which is not private, use transformers.Trainer."
        )
    if isinstance(train_dataset, IterableDataset) or not hasattr(train_dataset, "__len__"):
        raise Unsupported(
            f"train_dataset is {with_article(type(train_dataset).__name__)} without a length: a stream "
            "hands out records in an order of its own, where none takes part by chance: no sampling, no "
            "charge. Pass a map-style data set; write a stream to disk once."
        )


def check_evaluation(eval_dataset: Any, train_dataset: Any) -> None:
    """Raise if metrics would be of training records, which no charge covers.

    Args:
        eval_dataset: to be evaluated on, or several by name; None or a name of one: nothing to compare.
        train_dataset: the private records.
    """
    for each in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
        if each is not None and not isinstance(each, str):
            check_held_out(each, train_dataset)


def check_inputs_left(kept: Any, train_dataset: Any, label_names: list[str]) -> None:
    """Raise if no column is left to feed the model: the collator's error would be of a private record.

    Args:
        kept: data set without the columns that forward() has no argument for.
        train_dataset: as it was passed.
        label_names: of the Trainer.
    """
    names = getattr(kept, "column_names", None)
    if isinstance(names, list) and not set(names) - {"label", "label_ids", *label_names}:
        raise DataError(
            f"train_dataset has the columns {', '.join(train_dataset.column_names)}, and of these only "
            f"{', '.join(names) or 'none'} is an argument of the model: words have to become numbers by "
            "public rules. Pass a tokenized data set, e.g. train_dataset.map(lambda record: "
            'tokenizer(record["text"], truncation=True, max_length=128)), or a collator that tokenizes '
            "and remove_unused_columns=False."
        )


def check_overrides(kind: type, *known: type) -> None:
    """Raise if a class of the Trainer draws or applies gradients by itself.

    Args:
        kind: of the Trainer.
        known: the private Trainer, whose steps are charged, and the library's own.
    """
    for each in kind.__mro__:
        for name in _STEP if each not in known else ():
            if name in vars(each):
                raise Unsupported(
                    f"{each.__name__} overrides {name}: the private step draws and applies what is "
                    "charged, and another would not be. Override compute_loss, the collator or the "
                    "data set instead."
                )


def pad_values(tokenizer: Any) -> dict[str, Any]:
    """Numbers to pad records with, by the names that the library's models use.

    Args:
        tokenizer: of the Trainer; None: it has none.
    """
    token = getattr(tokenizer, "pad_token_id", None)
    kind = getattr(tokenizer, "pad_token_type_id", None)
    return {"input_ids": token or 0, "token_type_ids": kind or 0, "labels": -100}
