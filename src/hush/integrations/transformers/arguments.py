"""TrainingArguments of a private run: their meaning for a plan, and those that are rejected."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
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
from hush.training.disjoint import check_held_out

_FUSED_BACKWARD = ("lomo", "adalomo")
_LAYERWISE = "_layerwise"
_DELTA_SHARE = 0.1
"""Default delta in units of 1 / number of records."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Budget or plan of a run, verified to agree with its TrainingArguments.

    Args:
        epsilon: Limit of the total cost on the ledger; None: no limit.
        delta: Delta of the guarantee; None: a tenth of 1 / number of records.
        plan: Plan of the run; None: calibrated to the budget.
        records: Number of slots.
        batch: Expected logical batch: per device, times accumulation, times processes.
        clip_norm: `max_grad_norm`; Trainer treats None as zero.
    """

    epsilon: float | None
    delta: float | None
    plan: Plan | None
    records: int
    batch: int
    clip_norm: float | None

    def __post_init__(self) -> None:
        if self.plan is not None:
            check_kind("plan", self.plan, Plan)
        elif self.epsilon is None:
            raise InvalidValue(
                "neither epsilon nor plan was passed, so the amount of noise is unknown. Pass "
                "PrivateTrainer(..., epsilon=3.0), or plan= with noise of your own."
            )
        _ = self.budget
        if self.batch > self.records:
            raise InvalidValue(
                f"the batch of the TrainingArguments is {self.batch} (per device, times accumulation, "
                f"times processes) and there are {self.records} records, but a sampling rate is at most "
                "1. Lower per_device_train_batch_size or gradient_accumulation_steps."
            )
        if self.plan is not None:
            self._check_agreeing(self.plan)
        elif self.clip_norm is None or self.clip_norm <= 0:
            raise InvalidValue(
                f"max_grad_norm={self.clip_norm} must be > 0: it is the clipping norm of each record's "
                "gradient. Leave it at 1.0, or pass plan=."
            )

    @cached_property
    def delta_or_default(self) -> float:
        """Delta of the guarantee."""
        return _DELTA_SHARE / self.records if self.delta is None else self.delta

    @cached_property
    def budget(self) -> Budget | None:
        """Limit of the total cost on the ledger; None: no limit."""
        if self.epsilon is None:
            return None
        return Budget(epsilon=self.epsilon, delta=self.delta_or_default)

    def plan_for(self, steps: int) -> Plan:
        """Plan of a run: the one that was passed, or noise calibrated to the budget.

        Args:
            steps: Total number of optimizer steps.
        """
        if self.plan is not None:
            return self.plan
        assert self.budget is not None
        assert self.clip_norm is not None
        plan = Plan(
            sampling=Poisson(rate=self.batch / self.records),
            clipping=L2(norm=self.clip_norm),
            noise=Gaussian(multiplier=1.0),
        )
        return calibrate(plan, self.budget, steps=steps)

    def _check_agreeing(self, plan: Plan) -> None:
        expected = plan.sampling.expected(self.records)
        if abs(expected - self.batch) >= 0.5:
            raise InvalidValue(
                f"the plan draws {expected:g} of {self.records} records on average, but the batch of "
                f"the TrainingArguments is {self.batch} (per device, times accumulation and processes). "
                f"Pass sampling=hush.Poisson(rate={self.batch} / {self.records}), or other arguments."
            )
        if self.clip_norm not in (None, 0, getattr(plan.clipping, "norm", None)):
            raise InvalidValue(
                f"max_grad_norm={self.clip_norm} and the plan clips each record's gradient by "
                f"{plan.clipping}: a noisy gradient is not clipped again. Pass "
                "TrainingArguments(max_grad_norm=0), or the plan's norm."
            )


def check_arguments(args: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Raise for arguments that a private step cannot honour.

    Args:
        args: TrainingArguments.
        train_dataset: Private records.
        eval_dataset: Evaluation data of the Trainer.
    """
    check_records(train_dataset)
    check_evaluation(eval_dataset, train_dataset)
    optimizer = str(_plain(args.optim))
    rejected = {
        "fp16": args.fp16 and "private gradients are computed without a gradient scaler: use bf16",
        "deepspeed": args.deepspeed
        and "it computes, splits and applies gradients itself, without clipping them per record",
        "fsdp": args.fsdp
        and "it splits the weights itself: use fully_shard in a loop of your own (docs/distributed.md)",
        "train_sampling_strategy": args.train_sampling_strategy != "random"
        and f"{args.train_sampling_strategy!r} selects records by their length or position, but each "
        "record is charged as an independent draw",
        "auto_find_batch_size": args.auto_find_batch_size
        and "it repeats steps with another batch size, which is another plan",
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen != "no"
        and "the number of tokens in a batch depends on who was drawn",
        "neftune_noise_alpha": args.neftune_noise_alpha is not None
        and "its hook draws inside the model, which is untested here",
        "use_liger_kernel": args.use_liger_kernel
        and "its kernels compute gradients of the batch, not of each record",
        "n_gpu": args.n_gpu > 1
        and "one process with several GPUs averages gradients before they are clipped: start it with "
        "torchrun, one process per GPU, or show it one GPU (CUDA_VISIBLE_DEVICES)",
        "optim": (optimizer in _FUSED_BACKWARD or optimizer.endswith(_LAYERWISE))
        and f"{optimizer} updates weights during the backward pass, before anything is charged",
    }
    for name, reason in rejected.items():
        if reason:
            value = _plain(getattr(args, name))
            raise Unsupported(f"{name}={value!r} of the TrainingArguments cannot be private: {reason}.")


def _plain(value: Any) -> Any:
    """Value that was passed: TrainingArguments convert names to members of enumerations."""
    return value.value if isinstance(value, Enum) else value


def check_records(train_dataset: Any) -> None:
    """Raise for training records that cannot be sampled.

    Args:
        train_dataset: Training data of the Trainer.
    """
    if train_dataset is None:
        raise InvalidValue(
            "train_dataset was not passed: the noise depends on the number of private records. Pass "
            "train_dataset=...; for evaluation alone, which is not private, use transformers.Trainer."
        )
    if isinstance(train_dataset, IterableDataset) or not hasattr(train_dataset, "__len__"):
        raise Unsupported(
            f"train_dataset is {with_article(type(train_dataset).__name__)} without a length: a stream "
            "returns records in its own order, and there is no sampling, no charge. Pass a map-style "
            "data set; write a stream to disk once."
        )


def check_evaluation(eval_dataset: Any, train_dataset: Any) -> None:
    """Raise if metrics would be computed on training records, which no charge covers.

    Args:
        eval_dataset: Evaluation data, or several data sets by name; None or a name: nothing to compare.
        train_dataset: Private records.
    """
    for each in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
        if each is not None and not isinstance(each, str):
            check_held_out(each, train_dataset)


def check_columns(kept: Any, train_dataset: Any, label_names: list[str]) -> None:
    """Raise if the model takes no column of the data, before the collator's error shows a record.

    Args:
        kept: Data set without the columns that are not arguments of forward().
        train_dataset: Data set as it was passed.
        label_names: Label names of the Trainer.
    """
    names = getattr(kept, "column_names", None)
    if isinstance(names, list) and not set(names) - {"label", "label_ids", *label_names}:
        raise DataError(
            f"train_dataset has the columns {', '.join(train_dataset.column_names)}, and of these only "
            f"{', '.join(names) or 'none'} is an argument of the model. Pass a tokenized data set, e.g. "
            'train_dataset.map(lambda record: tokenizer(record["text"], truncation=True, '
            "max_length=128)), or a collator that tokenizes and remove_unused_columns=False."
        )
