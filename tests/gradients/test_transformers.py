"""Models of the transformers library, unchanged, with and without LoRA."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hush.gradients.recording import record
from tests.gradients.oracle import check_tape, one_at_a_time
from tests.gradients.rules.test_attention import FUSED, Calls

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
transformers = pytest.importorskip("transformers")


def next_word(outputs: Any, targets: Tensor) -> Tensor:
    by_token = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), targets, reduction="none")
    return by_token.mean(1)


def label(outputs: Any, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.logits, targets, reduction="none")


def gpt2() -> Any:
    torch.manual_seed(0)
    settings = transformers.GPT2Config(
        vocab_size=300, n_positions=16, n_embd=12, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(settings).double().train()


def test_gpt2_with_records_of_different_length() -> None:
    model, tokens = gpt2(), torch.randint(0, 300, (4, 6))
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, 4:] = 0
    for inputs in (tokens, {"input_ids": tokens, "attention_mask": mask}):
        expected = one_at_a_time(model, next_word, inputs, tokens, 4)
        check_tape(record(model, next_word, inputs, tokens), expected, 1e-10)


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    model, tokens = peft.get_peft_model(gpt2(), settings), torch.randint(0, 300, (4, 6))
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value)
    expected = one_at_a_time(model, next_word, tokens, tokens, 4)
    assert expected.shape[1] < 1000, "only the small matrices are trained"
    check_tape(record(model, next_word, tokens, tokens), expected, 1e-10)


def test_vit() -> None:
    torch.manual_seed(0)
    settings = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8,
        patch_size=4, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(settings).double().train()
    inputs, targets = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.randint(0, 3, (4,))
    expected = one_at_a_time(model, label, inputs, targets, 4)
    with Calls() as calls:
        tape = record(model, label, inputs, targets)
    assert calls.deterministic[f"{FUSED}_backward"]
    check_tape(tape, expected, 1e-10)


def with_dropout(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 50}
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(num_attention_heads=2, **sizes))
    if kind == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                num_attention_heads=4,
                num_key_value_heads=2,
                attention_dropout=0.2,
                bos_token_id=0,
                eos_token_id=0,
                pad_token_id=0,
                **sizes,
            )
        )
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50, n_embd=12, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_gradient_checkpointing_changes_nothing(kind: str) -> None:
    tokens, mask = torch.randint(1, 50, (4, 6)), torch.ones(4, 6, dtype=torch.long)
    mask[1, 4:] = 0
    results = []
    for checkpointing in (False, True):
        model = with_dropout(kind).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        chunks = record(model, next_word, {"input_ids": tokens, "attention_mask": mask}, tokens).chunks()
        results.append([part.clone() for _, parts in chunks for part in parts.values()])
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


def test_lora_with_gradient_checkpointing() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    model, tokens = peft.get_peft_model(gpt2(), settings), torch.randint(0, 300, (4, 6))
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value)
    expected = one_at_a_time(model, next_word, tokens, tokens, 4)
    model.gradient_checkpointing_enable()
    check_tape(record(model, next_word, tokens, tokens), expected, 1e-10)
