"""A private Trainer: the same step, its charges, checkpoints, adapters and refusals."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hush
from hush.core.errors import (
    BudgetExceeded,
    CheckpointError,
    DataError,
    InvalidValue,
    PrivacyWarning,
    Unsupported,
)
from hush.integrations.transformers import PrivateTrainer
from hush.training import checkpoint
from hush.training.run_folder import step_file

# the runs of these tests are short
pytestmark = pytest.mark.filterwarnings("ignore:the noise is larger than the signal")

RECORDS, LENGTH = 60, 6
PLAN = hush.plans.dpsgd(rate=15 / 60, clip_norm=1.0, multiplier=2.0)


class Words(Dataset[Any]):
    """Records of different lengths, with a column that the model does not take."""

    def __init__(self, records: int = RECORDS, shift: int = 0) -> None:
        self.records, self.shift = records, shift

    def __len__(self) -> int:
        return self.records

    def __getitem__(self, index: int) -> dict[str, Any]:
        words = [1 + (index + self.shift) % 2, *range(3, 4 + index % 4)]
        return {"input_ids": words, "attention_mask": [1] * len(words), "labels": index % 2, "id": index}


def collate(records: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads to the longest of a batch, as collators do."""
    longest = max(len(record["input_ids"]) for record in records)
    padded = {
        name: torch.tensor([(record[name] + [0] * longest)[:longest] for record in records])
        for name in ("input_ids", "attention_mask")
    }
    return {**padded, "labels": torch.tensor([record["labels"] for record in records])}


def bert(dropout: float = 0.1) -> Any:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"vocab_size": 10, "max_position_embeddings": 8, "num_hidden_layers": 1}
    sizes |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model: Any = BertForSequenceClassification
    return model(BertConfig(**sizes))


def trainer(
    folder: Path, model: Any = None, seed: int = 0, kind: Any = PrivateTrainer, **options: Any
) -> Any:
    """A trainer of 8 steps: two epochs of 60 records in batches of 15."""
    settings: dict[str, Any] = {"per_device_train_batch_size": 15, "num_train_epochs": 2}
    settings |= {"learning_rate": 0.01, "save_strategy": "no", "logging_steps": 4}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(str(folder), **settings | options.pop("args", {}))
    if "epsilon" not in options:
        options.setdefault("plan", PLAN)
    return kind(
        model or bert(),
        args,
        **{"train_dataset": Words(), "data_collator": collate, "pad_to": LENGTH, "delta": 1e-3}
        | {"generator": torch.Generator().manual_seed(seed)}
        | options,
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def padded() -> dict[str, Tensor]:
    rows = collate([Words()[index] for index in range(RECORDS)])
    filling = torch.zeros(RECORDS, LENGTH - rows["input_ids"].shape[1], dtype=torch.long)
    return {name: torch.cat([rows[name], filling], 1) for name in ("input_ids", "attention_mask")}


def test_the_trainer_runs_the_steps_of_an_own_loop(tmp_path: Path) -> None:
    batch = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3}
    batch["dataloader_num_workers"] = 1
    run, model = trainer(tmp_path, bert(dropout=0), epsilon=8.0, args=batch), bert(dropout=0)
    output = run.train()
    plan = run.private_step.plan
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
    step = hush.PrivateStep(
        model,
        lambda outputs, labels: nn.functional.cross_entropy(outputs.logits, labels, reduction="none"),
        optimizer,
        plan,
        records=RECORDS,
        randomness=hush.Randomness(generator=torch.Generator().manual_seed(0)),
        execution=hush.Execution(physical_batch=5),
    )
    for drawn in step.batches((padded(), torch.arange(RECORDS) % 2), steps=8):
        step(drawn)
        schedule.step()
    assert torch.allclose(weights(run.model), weights(model), atol=1e-5)
    assert not torch.allclose(weights(run.model), weights(bert()), atol=1e-2)
    assert run.spent().epsilon == step.spent(1e-3).epsilon
    assert 7.99 < run.spent().epsilon.upper <= 8.0
    assert (plan.sampling, plan.clipping) == (hush.Poisson(0.25), hush.L2(0.1))
    assert (run.state.global_step, output.global_step) == (8, 8)
    assert not multiprocessing.active_children(), "workers end with training"


def test_logs_have_epsilon_and_nothing_of_the_records(tmp_path: Path) -> None:
    evaluated = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    run = trainer(tmp_path, eval_dataset=Words(7, shift=1), args=evaluated)
    output = run.train()
    assert output.training_loss != output.training_loss
    keys = {name for line in run.state.log_history for name in line}
    held_out = {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert keys == {"epsilon", "learning_rate", "epoch", "step"} | held_out
    assert not output.metrics
    spent = [line["epsilon"] for line in run.state.log_history if "epsilon" in line]
    assert spent == pytest.approx([hush.epsilon(PLAN, steps, 1e-3).epsilon.upper for steps in (4, 8)])


class PowerFailure(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            raise RuntimeError("power failure")


def test_a_resumed_run_goes_on_bit_for_bit_and_pays_once(tmp_path: Path) -> None:
    """Interrupted three steps after a checkpoint, which is in the middle of an epoch."""
    whole = trainer(tmp_path / "whole", seed=1)
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8}
    folder, args = tmp_path / "run", {"args": saving}
    with pytest.raises(RuntimeError, match="power failure"):
        trainer(folder, seed=1, callbacks=[PowerFailure()], **args).train()
    assert hush.Ledger(folder / "ledger.jsonl", read_only=True).counts == {PLAN: 6}
    resumed = trainer(folder, seed=1, **args)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert resumed.private_step.ledger.counts == {PLAN: 8}

    # the checkpoint holds what is charged, and the key of the noise is not in it
    name = json.loads((folder / "checkpoint-8" / "private_step.json").read_text())
    step = resumed.private_step
    assert name == {"run": step.run, "steps": 8, "ledger": step.ledger.identity}
    secret = step_file(folder / "ledger.jsonl")
    key = checkpoint.load(secret)[f"{name['run']}/8"]["step"]["generator"].numpy().tobytes()
    assert key in secret.read_bytes(), "the search is not idle"
    assert not any(key in file.read_bytes() for file in (folder / "checkpoint-8").iterdir())

    (folder / "checkpoint-3" / "private_step.json").unlink()
    with pytest.raises(CheckpointError, match="is not a complete checkpoint of a private run"):
        trainer(folder, seed=1, **args).train(resume_from_checkpoint=folder / "checkpoint-3")


def test_an_adapter_is_saved_reloaded_and_really_changed(tmp_path: Path) -> None:
    """LoRA: what is on disk is what was trained, and it is not what it was before."""

    def lora() -> Any:
        config = LoraConfig(
            r=2, target_modules=["query", "value"], modules_to_save=["classifier"], task_type="SEQ_CLS"
        )
        torch.manual_seed(1)
        return get_peft_model(bert(), config)

    model, inputs = lora(), padded()
    run = trainer(tmp_path, model, args={"save_strategy": "epoch"})
    run.train()
    run.save_model(tmp_path / "adapter")
    for folder in (tmp_path / "adapter", tmp_path / "checkpoint-8"):
        reloaded = PeftModel.from_pretrained(bert(), folder)
        trained = {name: value for name, value in reloaded.named_parameters() if "lora_" in name}
        assert len(trained) == 4
        for name, value in trained.items():
            assert torch.equal(value, model.get_parameter(name))
            assert not torch.equal(value, lora().get_parameter(name)), name
        with torch.no_grad():
            logits = [each.eval()(**inputs).logits for each in (reloaded, model, lora())]
        assert torch.equal(logits[0], logits[1])
        assert not torch.allclose(logits[0], logits[2], atol=1e-3)
    sizes = [value.numel() for value in model.parameters() if value.requires_grad]
    assert run.private_step.dimension == sum(sizes)
    frozen = [name for name, value in model.named_parameters() if not value.requires_grad]
    assert all(torch.equal(model.get_parameter(name), lora().get_parameter(name)) for name in frozen)


def test_the_loss_is_the_trainers_own(tmp_path: Path) -> None:
    class Weighted(PrivateTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            labels = inputs.pop("labels")
            weight = torch.tensor([1.0, 9.0])
            self.log({"batch_loss": 1.0})
            return nn.functional.cross_entropy(model(**inputs).logits, labels, weight, reduction="sum")

    runs = [trainer(tmp_path / "plain", args={"max_steps": 2})]
    runs += [trainer(tmp_path / "smooth", args={"max_steps": 2, "label_smoothing_factor": 0.3})]
    runs += [trainer(tmp_path / "weighted", args={"max_steps": 2}, kind=Weighted)]
    for run in runs[:2]:
        run.train()
    with pytest.warns(PrivacyWarning, match="compute_loss logs batch_loss"):
        runs[2].train()
    assert not any("batch_loss" in line for line in runs[2].state.log_history)
    plain, smooth, weighted = (weights(run.model) for run in runs)
    assert not torch.allclose(plain, smooth, atol=1e-5)
    assert not torch.allclose(plain, weighted, atol=1e-5)


def test_a_budget_ends_the_run_and_holds_for_all_runs_in_a_folder(tmp_path: Path) -> None:
    limit = hush.epsilon(PLAN, 3, 1e-3).epsilon.upper * 1.001
    run = trainer(tmp_path, plan=PLAN, epsilon=limit)
    with pytest.warns(UserWarning, match="the run ends after 3"):
        run.train()
    assert (run.state.global_step, run.private_step.steps) == (3, 3)
    assert run.spent().epsilon.upper <= limit
    with pytest.raises(BudgetExceeded, match="with the charges on the ledger"):
        trainer(tmp_path, plan=PLAN, epsilon=limit).train()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"train_dataset": Stream(), "args": {"max_steps": 2}}, "does not support Poisson sampling"),
        ({"train_dataset": Stream()}, "does not support Poisson sampling"),
        ({"args": {"train_sampling_strategy": "group_by_length"}}, "selects records by their length"),
        ({"args": {"auto_find_batch_size": True}}, "another plan"),
        ({"args": {"include_num_input_tokens_seen": True}}, "depends on which records were drawn"),
        ({"args": {"optim": "adalomo"}}, "optim='adalomo' .* before the step is charged"),
        (
            {"args": {"optim": "galore_adamw_layerwise", "optim_target_modules": ["query"]}},
            "before the step is charged",
        ),
        ({"args": {"neftune_noise_alpha": 5.0}}, "neftune_noise_alpha=5.0"),
    ],
)
def test_arguments_that_cannot_be_private_are_refused_by_name(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        trainer(tmp_path, **options)


def test_metrics_of_the_training_records_are_refused(tmp_path: Path) -> None:
    records = Words()
    with pytest.raises(DataError, match="evaluation data shares records"):
        trainer(tmp_path, train_dataset=records, eval_dataset={"seen": records})
    some: Any = Subset(records, range(10))
    with pytest.raises(DataError, match="shares records"):
        trainer(tmp_path, train_dataset=records, eval_dataset=some)
    run = trainer(tmp_path, train_dataset=records, eval_dataset=Words(8, shift=1))
    with pytest.raises(DataError, match="evaluation data shares records"):
        run.evaluate(records, metric_key_prefix="train")
    with pytest.raises(DataError, match="shares records"):
        run.predict(some)
    assert not run.state.log_history


@pytest.mark.parametrize("name", ["fp16", "deepspeed", "fsdp"])
def test_arguments_that_are_changed_later_are_refused(tmp_path: Path, name: str) -> None:
    run = trainer(tmp_path)
    setattr(run.args, name, True)
    with pytest.raises(Unsupported, match=f"{name}=True of the TrainingArguments cannot be private"):
        run.train()


@pytest.mark.parametrize(
    ("flag", "name"), [("is_fsdp_enabled", "FSDP"), ("is_deepspeed_enabled", "DeepSpeed")]
)
def test_libraries_that_a_launcher_enables_are_refused(tmp_path: Path, flag: str, name: str) -> None:
    """`accelerate launch --use_fsdp` leaves the TrainingArguments as they are."""
    run = trainer(tmp_path)
    assert not getattr(run, flag)
    setattr(run, flag, True)
    with pytest.raises(Unsupported, match=f"accelerate launch has enabled {name}, which averages"):
        run.train()
    assert run.private_step is None


@pytest.mark.parametrize("kept", ["list", "number"])
def test_a_loss_that_is_stored_for_a_later_log_is_refused(tmp_path: Path, kept: str) -> None:
    class Metrics(PrivateTrainer):
        """As trainers of other libraries do: stored by compute_loss, logged by log."""

        stored: dict[str, list[float]]

        def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:  # type: ignore[override]
            loss: Any = super().compute_loss(model, inputs, **options)
            if kept == "list":
                self.stored["mine"].append(loss.item())
            else:
                self.total = loss.item()
            return loss

    run = trainer(tmp_path, kind=Metrics)
    run.stored, run.total = {"mine": []}, 0.0
    name = {"list": "stored", "number": "total"}[kept]
    with pytest.raises(Unsupported, match=f"compute_loss changes {name} of the Trainer"):
        run.train()
    assert not run.private_step.ledger.counts


def test_a_trainer_that_steps_by_itself_is_refused(tmp_path: Path) -> None:
    class Own(PrivateTrainer):
        def training_step(self, *_: Any, **__: Any) -> Any:
            return torch.zeros(())

    class Mine(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return None

    class Mixed(PrivateTrainer, Mine):
        pass

    with pytest.raises(Unsupported, match="Own overrides training_step"):
        trainer(tmp_path, kind=Own).train()
    with pytest.raises(Unsupported, match="Mixed overrides _get_train_sampler"):
        trainer(tmp_path, kind=Mixed).train()
    with pytest.raises(Unsupported, match=r"use hush\.tune|Use hush\.tune"):
        trainer(tmp_path).hyperparameter_search()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"plan": None}, "neither epsilon nor plan was passed"),
        ({"args": {"per_device_train_batch_size": 12}}, "draws 15 of 60 records on average"),
        ({"args": {"max_grad_norm": 0.5}}, "noisy gradients are not clipped again"),
        ({"epsilon": 1.0, "args": {"max_grad_norm": 0.0}}, "max_grad_norm=0.0 must be > 0"),
        ({"epsilon": 1.0, "args": {"max_grad_norm": None}}, "max_grad_norm=None must be > 0"),
        ({"args": {"gradient_accumulation_steps": 5}}, "is 75,"),
        ({"epsilon": "1"}, "epsilon='1' must be a finite number"),
        ({"train_dataset": None}, "train_dataset was not passed"),
    ],
)
def test_a_plan_and_the_arguments_say_the_same(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidValue, match=reason):
        trainer(tmp_path, **options)


def test_ragged_records_are_padded_and_the_guarantee_says_so(tmp_path: Path) -> None:
    run = trainer(tmp_path, pad_to="longest")
    run.train()
    assert run.spent().arithmetic == "assumed"


def test_settings_of_a_trainer_are_tuned(tmp_path: Path) -> None:
    """A trial's plan, steps and ledger go into the Trainer, and the selection is one charge."""

    def fit(settings: dict[str, Any], trial: Any) -> tuple[Any, float]:
        trained = trainer(
            tmp_path / str(settings["learning_rate"]),
            args={"max_steps": trial.steps, "learning_rate": settings["learning_rate"]},
            plan=trial.plan,
            delta=trial.budget.delta,
            ledger=trial.ledger,
            generator=None,
        )
        trained.train()
        return trained.model, -settings["learning_rate"]  # a public score

    ledger = hush.Ledger()
    space, budget = {"learning_rate": hush.Uniform(0.1, 0.2)}, hush.Budget(epsilon=8.0, delta=1e-3)
    tuned = hush.tune(fit, space, plan=PLAN, steps=2, budget=budget, mean=1.5, ledger=ledger)
    assert 7 < tuned.guarantee.epsilon.upper <= 8
    (charged,) = ledger.counts
    assert isinstance(charged.release, hush.BestOf)


def test_a_callback_that_stops_training_leaves_the_planned_steps_charged(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= 3

    run = trainer(tmp_path, epsilon=8.0, callbacks=[Stop()])
    run.train()
    assert run.private_step.steps == 3
    assert run.spent().epsilon == hush.epsilon(run.private_step.plan, 8, 1e-3).epsilon


def test_the_default_norm_is_that_of_short_gradients_or_of_the_plan(tmp_path: Path) -> None:
    run = trainer(tmp_path / "a", epsilon=8.0)
    run.train()
    assert run.private_step.plan.clipping == hush.L2(0.1)
    own = hush.plans.dpsgd(rate=15 / 60, clip_norm=0.3, multiplier=2.0)
    run = trainer(tmp_path / "b", plan=own)
    run.train()
    assert run.private_step.plan == own
    run = trainer(tmp_path / "c", epsilon=8.0, args={"max_grad_norm": 0.5})
    run.train()
    assert run.private_step.plan.clipping == hush.L2(0.5)


def test_noise_that_drowns_the_records_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the noise is larger than the signal: over 8 steps"):
        trainer(tmp_path, epsilon=0.01).train()
