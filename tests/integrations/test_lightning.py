"""Private training in Lightning's loop: the same step, its charges, checkpoints and refusals."""

import multiprocessing
import re
import stat
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

import hush
from hush.core.errors import CheckpointError, DataError, LedgerError, PrivacyWarning, Unsupported
from hush.integrations.lightning import PoissonLoader, PrivateModule, _check_trainer
from hush.training import checkpoint
from hush.training.run_folder import step_file

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*:Warning:lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:Warning"),
]

X = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(80) % 3
PLAN = hush.plans.dpsgd(rate=0.25, clip_norm=1.0, multiplier=4.0)
BUDGET = hush.Budget(epsilon=30.0, delta=1e-3)


class Classifier(lightning.LightningModule):
    """What people have: nothing of it knows of privacy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def private(kind: type) -> Any:
    """The module with the mix-in."""
    return type(f"Private{kind.__name__}", (PrivateModule, kind), {})


class Private(PrivateModule, Classifier):
    pass


def fit(
    module: lightning.LightningModule,
    epochs: int = 2,
    *,
    loader: Any = None,
    resume: Path | None = None,
    callbacks: Any = (),
    options: dict[str, Any] | None = None,
    seed: int = 0,
    validation: Any = None,
    **settings: Any,
) -> Any:
    """The loader, after training."""
    settings.setdefault("enable_checkpointing", bool(callbacks))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=list(callbacks),
        accelerator="cpu",
        log_every_n_steps=1,
        **quiet | settings,
    )
    if loader is None:
        generator = torch.Generator().manual_seed(seed)
        asked = {"data": (X, Y), **options} if options else {"data": (X, Y)}
        loader = PoissonLoader(plan=PLAN, budget=BUDGET, generator=generator, **asked)
    held_out = validation or DataLoader(TensorDataset(X + 1, Y), batch_size=40)
    trainer.fit(module, loader, held_out, ckpt_path=resume)
    return loader


def weights(module: nn.Module) -> Tensor:
    return torch.cat([value.detach().flatten() for value in module.parameters()])


def test_lightning_runs_the_steps_of_an_own_loop() -> None:
    module, plain = Private(), Classifier()
    loader = fit(module)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    seed = torch.Generator().manual_seed(0)
    parts: Any = (plain.net, nn.CrossEntropyLoss(), optimizer, PLAN)
    step = hush.PrivateStep(*parts, records=80, randomness=hush.Randomness(generator=seed))
    rates = []
    for batch in step.batches((X, Y), steps=8):
        step(batch)
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert torch.allclose(weights(module), weights(plain), atol=1e-6)
    assert module.rates == pytest.approx(rates)
    assert loader.spent().epsilon == step.spent(1e-3).epsilon
    next(module.parameters()).data.zero_()  # as after a test of the best weights
    assert loader.spent().epsilon == step.spent(1e-3).epsilon
    assert module.trainer.global_step == 8
    assert float(module.trainer.callback_metrics["epsilon"]) == pytest.approx(
        step.spent(1e-3).epsilon.upper
    )


def test_a_resumed_run_goes_on_bit_for_bit_and_pays_once(tmp_path: Path) -> None:
    """Interrupted after steps that no checkpoint has, which are repeated."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 11:
                raise RuntimeError("power failure")

    uninterrupted = Private()
    fit(uninterrupted, 4, seed=1)
    options: dict[str, Any] = {"ledger": tmp_path / "ledger.jsonl"}
    kept = ModelCheckpoint(tmp_path, filename="{step}")
    with pytest.raises(RuntimeError, match="power failure"):
        fit(Private(), 4, callbacks=[kept, Stop()], options=options, seed=1)
    assert hush.Ledger(options["ledger"], read_only=True).counts == {PLAN: 11}
    resumed = Private()
    loader = fit(resumed, 4, resume=tmp_path / "step=8.ckpt", options=options, seed=1)
    assert torch.equal(weights(resumed), weights(uninterrupted))
    assert loader.step.ledger.counts == {PLAN: 16}
    assert resumed.rates == uninterrupted.rates[8:]


def test_checkpoints_hold_what_is_charged_and_no_more(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    loader = fit(Private(), callbacks=[ModelCheckpoint(tmp_path)], options={"ledger": ledger})
    (file,) = tmp_path.glob("*.ckpt")
    saved = torch.load(file, weights_only=True)
    assert saved["hush"] == {"run": loader.step.run, "steps": 8, "ledger": loader.step.ledger.identity}
    expected = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks"}
    assert set(saved) == expected | {"optimizer_states", "lr_schedulers", "hush"}
    assert set(saved["state_dict"]) == set(Classifier().state_dict())
    secret = step_file(ledger)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    state = checkpoint.load(secret)[f"{loader.step.run}/8"]
    key = state["step"]["generator"].numpy().tobytes()
    assert key in secret.read_bytes(), "the search is not idle"
    assert key not in file.read_bytes()


@pytest.mark.filterwarnings("ignore:some of the model's weights come:hush.PrivacyWarning")
def test_a_run_goes_on_with_its_own_ledger_key_and_records(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ledger": tmp_path / "ledger.jsonl"}
    fit(Private(), 1, callbacks=[ModelCheckpoint(tmp_path, filename="kept")], options=options)
    file = tmp_path / "kept.ckpt"
    with pytest.raises(CheckpointError, match="in memory: it lacks the charges of the run"):
        fit(Private(), resume=file)
    other = PoissonLoader((X.flip(0), Y), PLAN, BUDGET, **options)
    with pytest.raises(CheckpointError, match="records differ from the run"):
        fit(Private(), resume=file, loader=other)
    step_file(options["ledger"]).unlink()
    with pytest.raises(CheckpointError, match="has no state of step 4"):
        fit(Private(), resume=file, options=options)
    torch.save({**torch.load(file, weights_only=True), "hush": None}, file)
    with pytest.raises(CheckpointError, match="is not a checkpoint of a private run"):
        fit(Private(), resume=file, options=options)


def test_weights_that_something_else_moves_end_the_guarantee() -> None:
    class Clamp(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                with torch.no_grad():
                    pl_module.net[0].weight.clamp_(-0.01, 0.01)

    for epochs in (1, 2):  # after the last step, and before another
        loader = PoissonLoader((X, Y), PLAN, BUDGET)
        with pytest.raises(LedgerError, match="weights were changed outside of the private step"):
            fit(Private(), epochs, loader=loader, callbacks=[Clamp()], enable_checkpointing=False)
        assert loader.step is not None
        assert loader.step.steps == 4


def test_the_budget_ends_the_run() -> None:
    budget = hush.Budget(epsilon=hush.epsilon(PLAN, 3, 1e-3).epsilon.upper * 1.001, delta=1e-3)
    loader = PoissonLoader((X, Y), PLAN, budget)
    with pytest.warns(UserWarning, match="the run ends after 3"):
        fit(Private(), loader=loader)
    assert loader.step is not None
    assert loader.step.steps == 3
    assert loader.spent().epsilon.upper <= budget.epsilon


def test_a_callback_that_stops_training_leaves_the_planned_steps_charged() -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 3

    loader = fit(Private(), callbacks=[Stop()], enable_checkpointing=False)
    assert loader.step.steps == 3
    assert loader.spent().epsilon == hush.epsilon(PLAN, 8, 1e-3).epsilon


def test_low_precision_is_that_of_every_gradient() -> None:
    """Also of those by which the model is tried before the first draw."""
    seen = set()

    class Watching(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if is_functorch_wrapped_tensor(batch[0]):
                seen.add(torch.is_autocast_enabled("cpu"))
            return self.loss(batch)

    fit(private(Watching)(), 1, precision="bf16-mixed")
    assert seen == {True}


def test_metrics_of_training_step_are_dropped(tmp_path: Path) -> None:
    """Logged by the module, by a logger, or by a logger's experiment."""

    class Logging(Classifier):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            loss: Tensor = self.loss(batch)
            self.log_dict({"train_loss": loss})
            self.logger.log_metrics({"logged": loss.item()}, step=self.global_step)  # type: ignore[union-attr]
            self.trainer.loggers[0].experiment.log_metrics({"logged": loss.item()}, 0)  # type: ignore[attr-defined]
            return {"loss": loss}

    module = private(Logging)()
    with pytest.warns(PrivacyWarning, match="training_step logs ('train_loss'|'logged'|to an exp)"):
        fit(module, 1, logger=CSVLogger(tmp_path))
    assert set(module.trainer.callback_metrics) == {"epsilon", "val_loss"}
    (log,) = tmp_path.rglob("metrics.csv")
    assert not re.search("train_loss|logged", log.read_text())
    assert "val_loss" in log.read_text()


def test_validation_on_the_training_records_is_refused() -> None:
    records = TensorDataset(X, Y)
    seen: Any = Subset(records, range(10))
    module = Private()
    with pytest.raises(DataError, match="evaluation data shares records"):
        fit(module, 1, options={"data": records}, validation=DataLoader(seen))
    assert not module.rates


def test_a_schedule_follows_validation_and_not_the_training_loss() -> None:
    class Follow(Classifier):
        monitor = "val_loss"

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=99)
            followed = {"scheduler": schedule, "monitor": self.monitor}
            return {"optimizer": optimizer, "lr_scheduler": followed}

    module = private(Follow)()
    fit(module, 3)
    assert module.rates[::4] == pytest.approx([1.0, 0.1, 0.01])
    module = private(Follow)()
    module.monitor = "train_loss"
    with pytest.raises(Unsupported, match="the schedule monitors 'train_loss', which is not logged"):
        fit(module, 1)


class Manual(PrivateModule, lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnStep(Private):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


class Two(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


class OwnOptimizer(Private):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reduced(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        (Private, {"loader": DataLoader(TensorDataset(X, Y))}, "a DataLoader: shuffled records"),
        (Private, {"precision": "64-true"}, "precision='64-true' scales losses or converts records"),
        (Private, {"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging cannot"),
        (OwnStep, {}, "OwnStep overrides the private training_step"),
        (OwnOptimizer, {}, "overrides the private configure_optimizers"),
        (private(Two), {}, "returns 2 optimizers"),
        (Manual, {}, "sets automatic_optimization=False"),
        (Classifier, {}, "needs a PrivateModule"),
        (Private, {"gradient_clip_val": 1.0}, r"gradient_clip_val=1\.0 .*set the plan's clipping"),
        (Private, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 .*its whole batch at once"),
        (private(Reduced), {}, r"loss of a batch of one record is a shape \(1, 3\)"),
    ],
)
def test_what_would_run_another_step_is_refused_by_name(
    kind: Any, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        fit(kind(), 1, **settings)


@pytest.mark.parametrize("name", ["DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"])
def test_strategies_that_shard_are_refused_by_name(name: str) -> None:
    strategy = type(name, (SingleDeviceStrategy,), {})(torch.device("cpu"))
    with pytest.raises(Unsupported, match=f"strategy {name} moves or shards .* Use one device or"):
        fit(Private(), 1, strategy=strategy)


def test_processes_that_take_the_ledger_with_them_are_refused() -> None:
    trainer = lightning.Trainer(
        strategy="ddp_spawn", devices=1, accelerator="cpu", logger=False, enable_checkpointing=False
    )
    with pytest.raises(Unsupported, match=r"ddp_spawn.*return the weights, but not the ledger"):
        _check_trainer(trainer)


def test_records_of_a_data_set_are_collated_one_by_one_and_padded() -> None:
    ragged = [(torch.arange(1 + number % 5), number % 3) for number in range(40)]

    class Words(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return ragged[index]

    def collate(records: list[Any]) -> dict[str, Tensor]:
        words = nn.utils.rnn.pad_sequence([words for words, _ in records], batch_first=True)
        return {"words": words, "label": torch.tensor([label for _, label in records])}

    class Bag(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(16, 3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch["words"]), batch["label"])

    pad_to = {"words": 4, "label": None}
    loader = PoissonLoader(Words(), PLAN, BUDGET, collate_fn=collate, pad_to=pad_to, workers=1)
    fit(private(Bag)(), 1, loader=loader, limit_val_batches=0)
    assert not multiprocessing.active_children(), "workers end with training"
    assert loader.step is not None
    assert loader.step.steps == 4
