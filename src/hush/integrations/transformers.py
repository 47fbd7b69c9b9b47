"""Hugging Face Trainer with differentially private training. See docs/transformers.md."""

import inspect
import json
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hush.accounting.calibrate import calibrate
from hush.accounting.ledger import Ledger
from hush.clipping import L2
from hush.core.errors import CheckpointError, InvalidValue, PrivacyWarning, Unsupported
from hush.core.guarantee import Budget, Guarantee
from hush.core.plan import Plan
from hush.core.value import check_kind, with_article
from hush.integrations import require
from hush.integrations.host_loop import HostLoop, batch_data
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.checkpoint import settings_of
from hush.training.disjoint import check_held_out
from hush.training.step import PrivateStep

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
else:
    _transformers = require("transformers", "transformers")
    require("accelerate", "transformers")
    Trainer, TrainerCallback = _transformers.Trainer, _transformers.TrainerCallback
    get_last_checkpoint = _transformers.trainer_utils.get_last_checkpoint

_NOT_CHARGED = ("loss", "grad_norm", "total_flos")
"""Metrics of training records that Trainer logs without the prefix "train_"."""
_STEP = ("training_step", "get_train_dataloader", "_get_train_sampler")
"""Methods of a Trainer that draw records and apply gradients."""
_DEFAULT_NORM, _CLIP_NORM = 1.0, 0.1
"""Default `max_grad_norm` of TrainingArguments, and the clipping norm that replaces it. Per-sample
gradients of pretrained models, and particularly of adapters, mostly have norms below 1."""
_FUSED_BACKWARD = ("lomo", "adalomo")
_ATTENTION = "sdpa_vectorized"
_NAME = "private_step.json"
"""File in a checkpoint with the public name of the private step's state."""


class PrivateTrainer(Trainer):
    """Trainer with differentially private training: `PrivateTrainer(..., epsilon=3.0)`.

    TrainingArguments keep their meaning. `per_device_train_batch_size` is the physical batch size, and
    its product with `gradient_accumulation_steps` and the number of processes is the expected batch
    size. Epochs or `max_steps`, the optimizer and the learning-rate schedule are unchanged.
    `max_grad_norm` is the clipping norm of per-sample gradients. Its default of 1.0 is replaced by 0.1,
    which suits pretrained models; pass `plan` to clip at 1. Callbacks, evaluation, logging, checkpoints
    and adapters work as in Trainer.

    **Guarantee.** `spent()` covers the weights, the checkpoints and the logs:
    `epsilon` replaces training losses and timings. Evaluation records are not protected. The loss of a
    record is `compute_loss` for a batch of that record alone.

    Args:
        args: Positional arguments of Trainer.
        epsilon: Maximum epsilon of all charges on the ledger. Noise is calibrated to it for the steps of
            the TrainingArguments, assuming a ledger without other runs. With other runs on the ledger,
            training stops earlier; pass a plan from `hush.calibrate(..., spent=ledger.counts)` instead.
        delta: Delta of the guarantee; by default 0.1 / the (public) number of records.
        plan: Plan to use instead of calibrated noise. Its batch size and norm must agree with the
            TrainingArguments. With `epsilon`, training stops when the budget is spent.
        pad_to: Public length to which the output of the data collator is padded or cut, or a dictionary
            of lengths by name. "longest": pad to the longest record of a physical batch, with
            `arithmetic: assumed`.
        ledger: Ledger or path; by default `ledger.jsonl` in `output_dir`. The privacy costs of all runs
            on a ledger add up.
        generator: Seed of sampling and noise, for tests; the guarantee then has `randomness: seeded`.
        options: Keyword arguments of Trainer.
    """

    def __init__(
        self,
        *args: Any,
        epsilon: float | None = None,
        delta: float | None = None,
        plan: Plan | None = None,
        pad_to: Any = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        self._plan = plan
        self._recording = False
        """Whether the loss of a record is being computed."""
        passed = {**dict(zip(inspect.signature(Trainer).parameters, args, strict=False)), **options}
        _check_records(
            passed.get("train_dataset")
        )  # before Trainer's error about max_steps for a stream
        super().__init__(*args, **options)
        if plan is None and epsilon is None:
            way = "Pass PrivateTrainer(..., epsilon=3.0), or plan= with a noise multiplier."
            raise InvalidValue(f"neither epsilon nor plan was passed: the noise is unknown. {way}")
        self._delta = 0.1 / self._records if delta is None else delta
        self._budget = None if epsilon is None else Budget(epsilon, self._delta)
        self._check()
        folder: Any = self.args.output_dir
        self._loop = HostLoop(Path(folder, "ledger.jsonl") if ledger is None else ledger, generator)
        self._pad_to = pad_to
        self._resumed: Path | None = None
        self._settings: list[dict[str, Any]] = []
        self.add_callback(_SaveStep(self._loop))

    @property
    def private_step(self) -> PrivateStep | None:
        """Private step; None before training begins."""
        return self._loop.step

    def spent(self, delta: float | None = None) -> Guarantee:
        """Guarantee of all releases on the ledger, by default at the delta of the run."""
        return self._loop.spent(delta)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train privately, as in Trainer. The output contains no training loss and no timings.

        A resumed run continues exactly, on the same ledger; repeated steps are not charged again.
        """
        self._check()
        for name in _STEP:
            if getattr(type(self), name) is not getattr(PrivateTrainer, name):
                raise Unsupported(
                    f"{type(self).__name__} overrides {name}: its gradients would be neither clipped "
                    "nor charged. Override compute_loss, the collator or the data set instead."
                )
        resumed: Any = resume_from_checkpoint
        if resumed is True:
            resumed = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
        self._resumed = Path(resumed) if resumed else None
        self._loop.step = None
        try:
            output = super().train(resume_from_checkpoint, *args, **options)
            if self.private_step is not None:
                if self.args.load_best_model_at_end:
                    self.private_step.adopt_weights()  # earlier releases, selected on evaluation records
                self._loop.stop()
                self.private_step.spent()  # raises if other code has changed the weights
        finally:
            self._loop.close()
        return output._replace(training_loss=math.nan, metrics=_charged(output.metrics))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Loader with one empty item per physical batch. The private step draws the records."""
        own = super().get_train_dataloader()
        records: Any = own.dataset
        tokenizer: Any = self.processing_class
        token = getattr(tokenizer, "pad_token_id", None) or 0
        kind = getattr(tokenizer, "pad_token_type_id", None) or 0
        self._loop.data = batch_data(
            records,
            collate_fn=own.collate_fn,
            workers=own.num_workers,
            pad_to=self._pad_to,
            pad_value={"input_ids": token, "token_type_ids": kind, "labels": -100},
        )
        accumulated = self.args.gradient_accumulation_steps
        items = math.ceil(len(own) / accumulated) * accumulated
        return DataLoader(range(items), batch_size=1, collate_fn=lambda _: {})  # type: ignore[arg-type]

    def num_examples(self, dataloader: DataLoader[Any]) -> int:
        """Number of records of a loader; the empty training loader has all training records."""
        if isinstance(dataloader.dataset, range):
            return self._records
        return int(super().num_examples(dataloader))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Zero: the count would depend on the drawn records."""
        return 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the schedule as in Trainer, after storing the optimizer's initial settings."""
        self._settings = settings_of(optimizer or self.optimizer)  # type: ignore[arg-type]
        return super().create_scheduler(num_training_steps, optimizer)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **options: Any
    ) -> Tensor:
        if self.private_step is None:
            self._begin()
        if self.accelerator.sync_gradients:
            model.train()
            self._loop.advance()
            if self._loop.done:
                self.control.should_training_stop = True
        return torch.zeros((), device=self.args.device)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log as in Trainer, with epsilon instead of training losses and timings."""
        if self._recording:
            warnings.warn(
                f"compute_loss logs {', '.join(logs)} of private records, which the guarantee does not "
                "cover: it is dropped. Log metrics of evaluation records, which need no protection.",
                PrivacyWarning,
                stacklevel=2,
            )
            return
        kept = _charged(logs)
        if "learning_rate" in kept and self.private_step is not None:
            kept["epsilon"] = self.private_step.spent().epsilon.upper
        if kept:
            super().log(kept, *args, **options)

    def evaluate(self, eval_dataset: Any = None, *args: Any, **options: Any) -> Any:
        """Evaluate and log metrics, as in Trainer. Raises for training records."""
        _check_evaluation(eval_dataset, self.train_dataset)
        return super().evaluate(eval_dataset, *args, **options)

    def predict(self, test_dataset: Any, *args: Any, **options: Any) -> Any:
        """Compute predictions and metrics, as in Trainer. Raises for training records."""
        _check_evaluation(test_dataset, self.train_dataset)
        return super().predict(test_dataset, *args, **options)

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Raise, because the charges of the runs do not cover the selection of the best run."""
        raise Unsupported(
            "hyperparameter_search releases the best of several runs, but the charges of the runs do "
            "not cover this selection. Use hush.tune, which charges the whole search once."
        )

    @property
    def _records(self) -> int:
        dataset: Any = self.train_dataset
        return len(dataset)

    def _check(self) -> Plan:
        """Validate the arguments and return the plan before calibration."""
        _check_evaluation(self.eval_dataset, self.train_dataset)
        _check_arguments(self.args)
        _check_launcher(self)
        batch = self.get_total_train_batch_size(self.args)
        plan, records, clip_norm = self._plan, self._records, self.args.max_grad_norm
        untouched = clip_norm == _DEFAULT_NORM
        if batch > records:
            raise InvalidValue(
                f"the batch of the TrainingArguments is {batch}, but there are {records} records: the "
                "sampling rate is at most 1. Reduce per_device_train_batch_size or "
                "gradient_accumulation_steps."
            )
        if plan is None:
            if not clip_norm or clip_norm < 0:
                text = (
                    f"max_grad_norm={clip_norm} must be > 0: it is the clipping norm of each record's "
                )
                raise InvalidValue(f"{text}gradient. Leave it out to clip at 0.1, or pass plan=.")
            clip_norm = _CLIP_NORM if untouched else clip_norm
            noise = Gaussian(multiplier=1.0)
            return Plan(sampling=Poisson(rate=batch / records), clipping=L2(norm=clip_norm), noise=noise)
        expected = check_kind("plan", plan, Plan).sampling.expected(records)
        if abs(expected - batch) >= 0.5:
            raise InvalidValue(
                f"the plan draws {expected:g} of {records} records on average, but the batch of the "
                f"TrainingArguments is {batch} (per device, times accumulation and processes). Pass "
                f"sampling=hush.Poisson(rate={batch} / {records}), or other arguments."
            )
        if not untouched and clip_norm not in (None, 0, getattr(plan.clipping, "norm", None)):
            raise InvalidValue(
                f"max_grad_norm={clip_norm}, but the plan clips by {plan.clipping}: noisy gradients are "
                "not clipped again. Pass TrainingArguments(max_grad_norm=0), or the norm of the plan."
            )
        return plan

    def _begin(self) -> None:
        plan, optimizer, model, steps = self._check(), self.optimizer, self.model, self.state.max_steps
        if self._plan is None:
            assert self._budget is not None
            plan = calibrate(plan, self._budget, steps)
        name = None
        if self._resumed is not None:
            try:
                name = json.loads((self._resumed / _NAME).read_text())
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{self._resumed} is not a complete checkpoint of a private run ({error}): weights "
                    "trained without noise are not private. Start with public weights, or restore "
                    f"{_NAME}."
                ) from None
        Path(str(self.args.output_dir)).mkdir(parents=True, exist_ok=True)
        vectorize_attention(model)  # type: ignore[arg-type]
        self._loop.begin(
            model,  # type: ignore[arg-type]
            self._loss_of_record,
            getattr(optimizer, "optimizer", optimizer),  # Accelerate wraps it
            plan,
            settings=self._settings,
            budget=self._budget,
            delta=self._delta,
            steps=steps,
            physical_batch=self.args.per_device_train_batch_size,
            resumed=name,
        )

    def _loss_of_record(self, batch: dict[str, Any]) -> Any:
        before = _contents(self)
        self._recording = True
        try:
            loss = self.compute_loss(self.model, dict(batch))  # type: ignore[arg-type]
        finally:
            self._recording = False
        after = _contents(self)
        changed = sorted(name for name in before | after if before.get(name) != after.get(name))
        if changed:
            raise Unsupported(
                f"compute_loss changes {', '.join(changed[:3])} of the Trainer: a metric of private "
                "records would be logged or saved without a charge. Do not store metrics between calls."
            )
        return loss


class _SaveStep(TrainerCallback):
    def __init__(self, loop: HostLoop) -> None:
        self._loop = loop

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        name = self._loop.save()
        if args.should_save:
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", _NAME)
            path.write_text(json.dumps(name) + "\n")


def _contents(trainer: Trainer) -> dict[str, Any]:
    """Numbers and sizes of containers in the attributes of a Trainer, to detect stored metrics."""
    contents: dict[str, Any] = {}
    for name, value in vars(trainer).items():
        if isinstance(value, (list, dict)):
            parts = value.values() if isinstance(value, dict) else value
            sizes = [len(part) for part in parts if isinstance(part, (list, dict))]
            contents[name] = (len(value), sizes)
        elif value is None or isinstance(value, (bool, int, float, str)):
            contents[name] = value
        elif isinstance(value, Tensor):
            contents[name] = (id(value), value._version)
    return contents


def _charged(metrics: dict[str, float]) -> dict[str, float]:
    """Remove training losses and timings, which the guarantee does not cover, from metrics."""
    kept = (name for name in metrics if name not in _NOT_CHARGED and not name.startswith("train_"))
    return {name: metrics[name] for name in kept}


def _check_arguments(args: Any) -> None:
    optimizer = str(getattr(args.optim, "value", args.optim))
    fused = optimizer in _FUSED_BACKWARD or optimizer.endswith("_layerwise")
    rejected = {
        "fp16": args.fp16 and "private gradients are computed without a gradient scaler: use bf16",
        "deepspeed": args.deepspeed and "it computes, splits and applies gradients of the batch itself",
        "fsdp": args.fsdp
        and "it shards the weights itself: use fully_shard in your own loop (docs/distributed.md)",
        "train_sampling_strategy": args.train_sampling_strategy != "random"
        and "it selects records by their length or position, not as independent draws",
        "auto_find_batch_size": args.auto_find_batch_size
        and "it repeats steps with another batch size, which is another plan",
        "include_num_input_tokens_seen": args.include_num_input_tokens_seen != "no"
        and "the number of tokens in a batch depends on which records were drawn",
        "neftune_noise_alpha": args.neftune_noise_alpha is not None
        and "its hook draws random numbers inside the model, which is not tested",
        "use_liger_kernel": args.use_liger_kernel
        and "its kernels compute gradients of the batch, not of each record",
        "n_gpu": args.n_gpu > 1
        and "one process with several GPUs averages gradients before they are clipped: use torchrun, or "
        "one GPU (CUDA_VISIBLE_DEVICES)",
        "optim": fused and "it updates weights in the backward pass, before the step is charged",
    }
    for name, reason in rejected.items():
        if reason:
            value = getattr(getattr(args, name), "value", getattr(args, name))  # of enumerations
            raise Unsupported(f"{name}={value!r} of the TrainingArguments cannot be private: {reason}.")


def _check_launcher(trainer: Trainer) -> None:
    """Raise if `accelerate launch` has enabled a library that splits gradients of the batch."""
    enabled = {"FSDP": trainer.is_fsdp_enabled, "DeepSpeed": trainer.is_deepspeed_enabled}
    for name, used in enabled.items():
        if used:
            raise Unsupported(
                f"accelerate launch has enabled {name}, which averages gradients over the batch before "
                "they are clipped, and splits the weights itself. Launch without it: --multi_gpu gives "
                "one process per GPU. For a model that does not fit on one GPU, use fully_shard in a "
                "loop of your own (docs/distributed.md)."
            )


def _check_records(train_dataset: Any) -> None:
    if train_dataset is None:
        raise InvalidValue(
            "train_dataset was not passed: the noise depends on the number of private records. Pass "
            "train_dataset=...; for evaluation alone, which is not private, use transformers.Trainer."
        )
    if isinstance(train_dataset, IterableDataset) or not hasattr(train_dataset, "__len__"):
        raise Unsupported(
            f"train_dataset is {with_article(type(train_dataset).__name__)} without a length: a "
            "stream does not support Poisson sampling. Pass a map-style data set."
        )


def _check_evaluation(eval_dataset: Any, train_dataset: Any) -> None:
    """Raise if metrics would be computed on training records."""
    for each in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
        if each is not None and not isinstance(each, str):
            check_held_out(each, train_dataset)


def vectorize_attention(model: nn.Module) -> None:
    """Replace `sdpa` attention by a variant that builds masks without a data-dependent branch.

    With `sdpa` attention, a model omits a mask that masks no position. `torch.vmap` does not support
    this branch, so a private step would process one record at a time. This function sets a variant of
    `sdpa` without the branch in all transformers models of `model`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def mask(*args: Any, **kwargs: Any) -> Any:
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register(_ATTENTION, ALL_ATTENTION_FUNCTIONS["sdpa"])
    AttentionMaskInterface.register(_ATTENTION, mask)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config._attn_implementation == "sdpa":
            module.set_attn_implementation(_ATTENTION)
