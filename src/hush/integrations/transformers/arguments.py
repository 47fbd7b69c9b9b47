"""TrainingArguments of a private run: their meaning for a plan, and those that are rejected."""

from enum import Enum
from typing import Any

from torch.utils.data import IterableDataset

from hush.clipping.norms import L2
from hush.core.errors import InvalidValue, Unsupported
from hush.core.plan import Plan
from hush.core.value import check_kind, with_article
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.disjoint import check_held_out

_FUSED_BACKWARD = ("lomo", "adalomo")


def plan_of(plan: Plan | None, records: int, batch: int, clip_norm: float | None) -> Plan:
    """The plan that was passed, verified to agree with TrainingArguments, or theirs with noise of 1.

    Args:
        plan: Plan of the run; None: of the arguments.
        records: Number of slots.
        batch: Expected logical batch: per device, times accumulation, times processes.
        clip_norm: `max_grad_norm`; Trainer treats None as zero.
    """
    if batch > records:
        raise InvalidValue(
            f"the batch of the TrainingArguments is {batch} (per device, times accumulation, times "
            f"processes) and there are {records} records, but a sampling rate is at most 1. Lower "
            "per_device_train_batch_size or gradient_accumulation_steps."
        )
    if plan is None:
        if not clip_norm or clip_norm < 0:
            raise InvalidValue(
                f"max_grad_norm={clip_norm} must be > 0: it is the clipping norm of each record's "
                "gradient. Leave it at 1.0, or pass plan=."
            )
        noise = Gaussian(multiplier=1.0)
        return Plan(sampling=Poisson(rate=batch / records), clipping=L2(norm=clip_norm), noise=noise)
    expected = check_kind("plan", plan, Plan).sampling.expected(records)
    if abs(expected - batch) >= 0.5:
        raise InvalidValue(
            f"the plan draws {expected:g} of {records} records on average, but the batch of the "
            f"TrainingArguments is {batch} (per device, times accumulation and processes). Pass "
            f"sampling=hush.Poisson(rate={batch} / {records}), or other arguments."
        )
    if clip_norm not in (None, 0, getattr(plan.clipping, "norm", None)):
        raise InvalidValue(
            f"max_grad_norm={clip_norm} and the plan clips each record's gradient by {plan.clipping}: a "
            "noisy gradient is not clipped again. Pass TrainingArguments(max_grad_norm=0), or the "
            "plan's norm."
        )
    return plan


def check_arguments(args: Any) -> None:
    """Raise for TrainingArguments that a private step cannot honour."""
    optimizer = str(_plain(args.optim))
    fused = optimizer in _FUSED_BACKWARD or optimizer.endswith("_layerwise")
    rejected = {
        "fp16": args.fp16 and "private gradients are computed without a gradient scaler: use bf16",
        "deepspeed": args.deepspeed and "it computes, splits and applies gradients of the batch itself",
        "fsdp": args.fsdp
        and "it splits the weights itself: use fully_shard in a loop of your own (docs/distributed.md)",
        "train_sampling_strategy": args.train_sampling_strategy != "random"
        and "it selects records by their length or position, but each is charged as an independent draw",
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
        "optim": fused and "it updates weights in the backward pass, before anything is charged",
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
