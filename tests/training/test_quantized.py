"""Frozen layers of integer weights: per-sample gradients, checkpoints, the Trainer."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import LedgerError
from hush.gradients.models import is_frozen_quantized
from hush.gradients.probe import probe
from tests.training.helpers import ENOUGH, plan_of, randomness
from tests.training.ordinary import check, next_word, step_of, vectors
from tests.training.test_ordinary_transformers import ONE_KEY, TEXT, pretrained, prompts

PLAN = plan_of(hush.Poisson(0.5), hush.L2(0.1))


class _Product(torch.autograd.Function):
    """A function with `ctx`, which `torch.vmap` does not run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Quantized") -> Tensor:
        ctx.layer = layer
        return x @ layer.dequantized(x.dtype).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.dequantized(grads[0].dtype), None


class Quantized(nn.Module):
    """A frozen linear layer of integers, as bitsandbytes has: a kernel, and its gradient if needed."""

    scale: Tensor

    def __init__(self, layer: nn.Linear, kind: str = "parameter") -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        integers = (weight / scale + 128).round().to(torch.uint8)
        if kind == "parameter":
            self.weight = nn.Parameter(integers, requires_grad=False)
        else:
            self.register_buffer("weight", integers)
        self.register_buffer("scale", scale)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return ((self.weight.to(dtype) - 128) * self.scale).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() <= 3  # as MatMul8bitLt
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
            return result
        with torch.no_grad():  # a kernel without a derivative
            return x @ self.dequantized(x.dtype).T


class Lora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)  # type: ignore[arg-type]
        self.up = nn.Linear(2, base.out_features, bias=False)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output


def network(kind: str = "parameter") -> nn.Module:
    layers = (Lora(Quantized(nn.Linear(6, 8), kind)), nn.ReLU(), Lora(Quantized(nn.Linear(8, 8), kind)))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_gradients_pass_a_quantized_layer(kind: str) -> None:
    """The first layer gets its gradient through the second, quantized one."""
    check((lambda: network(kind), nn.CrossEntropyLoss(), vectors), dtype=torch.float32)
    model, (x, y) = network(kind), vectors()
    properties = probe(model, nn.CrossEntropyLoss(reduction="none"), x, y)
    assert not properties.one_by_one
    assert properties.unused == ()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_without_the_rule_a_gradient_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.gradients.recording.is_frozen_quantized", lambda _: False)
    with pytest.raises(AssertionError, match="not close"):
        check((network, nn.CrossEntropyLoss(), vectors), dtype=torch.float32)


def test_layers_that_may_mix_rows_or_are_trained_are_not_batched() -> None:
    layer: Any = Quantized(nn.Linear(4, 4))
    assert is_frozen_quantized(layer)
    layer.state = type("State", (), {"threshold": 6.0})()  # outlier columns of all rows
    assert not is_frozen_quantized(layer)
    trained: Any = Quantized(nn.Linear(4, 4))
    trained.bias = nn.Parameter(torch.zeros(4))
    assert not is_frozen_quantized(trained)
    assert not is_frozen_quantized(nn.Linear(4, 4))
    assert not is_frozen_quantized(nn.Embedding(4, 4))


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_changed_integers_are_detected(kind: str) -> None:
    model, (x, y) = network(kind), vectors()
    step = step_of(model, nn.CrossEntropyLoss())
    for batch in step.batches((x, y), steps=1):
        step(batch)
    base: Any = model.get_submodule("0.base")
    base.weight.add_(1)
    with pytest.raises(LedgerError, match="changed outside of the private step"):
        step.spent(1e-5)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_run_is_resumed_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """The checkpoint holds the integers too."""

    def train(folder: Path, steps: int, *, resume: bool = False) -> nn.Module:
        torch.manual_seed(0)
        model = network(kind)
        if resume:  # other weights, which the checkpoint replaces
            with torch.no_grad():
                model.get_submodule("0.base").weight.fill_(7)  # type: ignore[operator]
        trained = [value for value in model.parameters() if value.requires_grad]
        hush.train(
            model, nn.CrossEntropyLoss(), torch.optim.Adam(trained, lr=0.1), PLAN, data,
            budget=ENOUGH, steps=steps, randomness=randomness(),
            checkpoints=hush.Checkpoints(directory=folder, resume=resume),
        )  # fmt: skip
        return model

    torch.manual_seed(1)
    data = vectors()
    whole = train(tmp_path / "whole", 4).state_dict()
    train(tmp_path / "parts", 2)
    resumed = train(tmp_path / "parts", 4, resume=True).state_dict()
    assert resumed["0.base.weight"].dtype == torch.uint8
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def base() -> Any:
    """A tiny Llama of two layers whose keys have quantized projections."""
    torch.manual_seed(0)
    model = pretrained("Llama", "ForCausalLM", {**TEXT, "num_hidden_layers": 2}, **ONE_KEY)
    for name, module in list(model.named_modules()):
        if name.endswith("k_proj"):
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, Quantized(module))
    return model


def decoder() -> Any:
    """The base with a LoRA of PEFT on its queries, which does not begin at zero."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base(), settings)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value)
    return model


def test_a_decoder_over_a_quantized_base() -> None:
    check((decoder, next_word, prompts), dtype=torch.float32)


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.arange(6) + 3 + index % 5
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


def test_the_trainer_saves_the_adapter_of_a_quantized_decoder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from hush.integrations.transformers import PrivateTrainer

    model = decoder()
    before = {name: value.clone() for name, value in model.named_parameters()}
    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=5, max_steps=2, learning_rate=0.01, use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = PrivateTrainer(model, args, train_dataset=Texts(), epsilon=8.0, delta=1e-3)
    trainer.train()
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == ("lora" not in name), name
    trainer.save_model(str(tmp_path / "adapter"))
    reloaded = pytest.importorskip("peft").PeftModel.from_pretrained(base(), tmp_path / "adapter")
    for name, value in reloaded.named_parameters():
        assert torch.equal(value, model.get_parameter(name)), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes(bits: int) -> None:
    """Runs if the package is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = pytest.importorskip("bitsandbytes")

    def layer() -> nn.Module:
        made = (
            library.nn.Linear4bit(64, 64, bias=False, compute_dtype=torch.float32)
            if bits == 4
            else library.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
        )
        quantized: nn.Module = made.to("cpu")
        return quantized

    def model() -> nn.Module:
        return nn.Sequential(Lora(layer()), nn.ReLU(), Lora(layer()), nn.Linear(64, 3))

    check((model, nn.CrossEntropyLoss(), lambda: vectors(64)), dtype=torch.float32)
    x, y = vectors(64)
    made = model()
    assert not probe(made, nn.CrossEntropyLoss(reduction="none"), x, y).one_by_one
