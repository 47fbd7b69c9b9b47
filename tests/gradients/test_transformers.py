"""Models of the transformers library, unchanged, in training mode, with padding, dropout and LoRA."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.gradients.recording import record
from hush.integrations.transformers import vectorize_attention
from tests.gradients.oracle import check_tape, one_at_a_time
from tests.gradients.rules.test_attention import FUSED, Calls

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:There is a performance drop"
)
transformers = pytest.importorskip("transformers")

RECORDS, LENGTH, PAD = 4, 6, 1


def next_word(outputs: Any, targets: Tensor) -> Tensor:
    by_token = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), targets, reduction="none")
    return by_token.mean(1)


def label(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, targets, reduction="none")


def text() -> dict[str, Tensor]:
    """Sentences of different length; the first has no padding."""
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(LENGTH) < torch.tensor([[6], [4], [3], [5]])).long()
    tokens = torch.randint(3, 31, (RECORDS, LENGTH), generator=generator).where(mask.bool(), PAD)
    return {"input_ids": tokens, "attention_mask": mask}


def translation() -> dict[str, Tensor]:
    both = text()
    return {
        **both,
        "decoder_input_ids": both["input_ids"],
        "decoder_attention_mask": both["attention_mask"],
    }


def speech() -> dict[str, Tensor]:
    lengths = torch.tensor([[200], [120], [160], [200]])
    heard = torch.randn(RECORDS, 200, generator=torch.Generator().manual_seed(1))
    return {"input_values": heard, "attention_mask": (torch.arange(200) < lengths).long()}


def spectrogram() -> dict[str, Tensor]:
    features = torch.randn(RECORDS, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": text()["input_ids"]}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(RECORDS, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


BASE = {
    "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 20, "pad_token_id": PAD,
}  # fmt: skip
ENCODER_DECODER = {
    "vocab_size": 31, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": 31, "n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
SPEECH = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_labels": 3,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 31,
}  # fmt: skip


def classifier(name: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**BASE, "num_labels": 3, **settings})
    return getattr(transformers, f"{name}ForSequenceClassification")(config)


def language_model(name: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**{**BASE, **settings})
    return getattr(transformers, f"{name}ForCausalLM")(config)


class ClipClassifier(nn.Module):
    """The vision part of CLIP, and a linear layer on its pooled output."""

    def __init__(self) -> None:
        super().__init__()
        settings = transformers.CLIPVisionConfig(**VISION, attention_dropout=0.1)
        self.vision, self.head = transformers.CLIPVisionModel(settings), nn.Linear(16, 3)

    def forward(self, pixel_values: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.vision(pixel_values).pooler_output))


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "bert": (lambda: classifier("Bert"), text),
    "distilbert": (lambda: classifier("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=24), text),
    "deberta-v2": (
        lambda: classifier("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]),
        text,
    ),
    "longformer": (lambda: classifier("Longformer", attention_window=4), text),
    "bart": (
        lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(**ENCODER_DECODER, max_position_embeddings=20)
        ),
        translation,
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
        ),
        translation,
    ),
    "gpt2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)), text),
    "gpt-neox": (lambda: language_model("GPTNeoX", hidden_dropout=0.1, attention_dropout=0.1), text),
    "llama": (lambda: language_model("Llama", num_key_value_heads=1, attention_dropout=0.1), text),
    "qwen2": (lambda: language_model("Qwen2", num_key_value_heads=1), text),
    "whisper": (
        lambda: transformers.WhisperForConditionalGeneration(
            transformers.WhisperConfig(
                **ENCODER_DECODER,
                num_mel_bins=8,
                max_source_positions=10,
                max_target_positions=20,
                dropout=0.1,
            )
        ),
        spectrogram,
    ),
    "wav2vec2": (
        lambda: transformers.Wav2Vec2ForSequenceClassification(
            transformers.Wav2Vec2Config(**SPEECH, mask_time_prob=0.0)
        ),
        speech,
    ),
    "vit": (
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**VISION, num_labels=3, hidden_dropout_prob=0.1)
        ),
        images,
    ),
    "clip": (ClipClassifier, images),
}


def build(name: str) -> tuple[Any, Any, dict[str, Tensor], Tensor]:
    """A model in training mode and double precision, its loss, and four records for it."""
    torch.manual_seed(0)
    make, records = MODELS[name]
    model, inputs = make().double().train(), records()
    inputs = {
        key: value.double() if value.is_floating_point() else value for key, value in inputs.items()
    }
    tokens = inputs.get("input_ids", inputs.get("decoder_input_ids"))
    if tokens is None or name in CLASSIFIERS:
        return model, label, inputs, torch.tensor([0, 1, 2, 1])
    return model, next_word, inputs, tokens


READ_VALUES = {"longformer", "bart", "whisper", "wav2vec2"}
"""Models that `torch.vmap` cannot run: they write into masks, or drop layers by a draw."""

CLASSIFIERS = {"bert", "distilbert", "deberta-v2", "longformer"}


def without_chance(model: nn.Module) -> None:
    """Leave out dropout and layer drop, so that a record has one gradient."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
        settings: Any = getattr(module, "config", None)
        if hasattr(settings, "layerdrop"):
            settings.layerdrop = 0.0


@pytest.mark.parametrize("name", MODELS)
def test_models_in_training_mode_with_padding(name: str) -> None:
    """Their own dropout and layer drop first; without them, the gradients of one record at a time."""
    model, loss, inputs, targets = build(name)
    vectorize_attention(model)
    one_by_one = name in READ_VALUES
    drawn = record(model, loss, inputs, targets, one_by_one=one_by_one).norms(2.0)
    without_chance(model)
    with Calls() as calls:
        tape = record(model, loss, inputs, targets, one_by_one=one_by_one)
    assert name != "vit" or calls.deterministic[f"{FUSED}_backward"]
    check_tape(tape, one_at_a_time(model, loss, inputs, targets, RECORDS), 1e-10)
    assert bool(drawn.isfinite().all())
    assert name == "qwen2" or not torch.allclose(drawn, tape.norms(2.0))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["bert", pytest.param("wav2vec2", marks=pytest.mark.slow)])
def test_private_steps(name: str, autocast: bool) -> None:
    model, loss, inputs, targets = build(name)
    inputs = {
        key: value.float() if value.is_floating_point() else value for key, value in inputs.items()
    }
    plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
    optimizer = torch.optim.SGD(model.float().parameters(), lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        step = hush.PrivateStep(model, loss, optimizer, plan, records=RECORDS)
        for batch in step.batches((inputs, targets), steps=2):
            step(batch)
    assert step.steps == 2
