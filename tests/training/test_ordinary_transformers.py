"""Tiny models of the transformers library: they train, on gradients of one record at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tests.training.ordinary import RECORDS, check, label, labels, next_word, text

# models of the transformers library, tiny and without dropout

TEXT = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 8, "max_position_embeddings": 12, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_labels": 3,
}  # fmt: skip
BOTH = {
    "vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "max_position_embeddings": 12,
}  # fmt: skip
VISION = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "image_size": 8, "patch_size": 4, "num_labels": 3,
}  # fmt: skip
SPEECH = {
    "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
    "conv_dim": (4, 4), "conv_stride": (4, 2), "conv_kernel": (8, 4), "num_labels": 3,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 20,
}  # fmt: skip


def pretrained(name: str, task: str, settings: dict[str, Any], **own: Any) -> nn.Module:
    """A model of the transformers library without dropout or layer drop."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**{**settings, **own})
    model: nn.Module = getattr(transformers, f"{name}{task}")(config)
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in key or isinstance(module, nn.Dropout)):
                setattr(module, key, 0.0)
        if hasattr(getattr(module, "config", None), "layerdrop"):
            module.config.layerdrop = 0.0  # type: ignore[union-attr]
    return model


def prompts() -> tuple[Any, Tensor]:
    tokens = torch.randint(3, 20, (RECORDS, 6))
    mask = torch.ones_like(tokens)
    tokens[1, 4:], mask[1, 4:] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}, tokens


def reviews() -> tuple[Any, Tensor]:
    return prompts()[0], labels()


def labelled_reviews() -> tuple[Any, Tensor]:
    inputs, targets = reviews()
    return {**inputs, "labels": targets}, targets


def answers() -> tuple[Any, Tensor]:
    tokens = torch.randint(3, 20, (RECORDS, 5))
    return {**prompts()[0], "decoder_input_ids": tokens}, tokens


def labelled_prompts() -> tuple[Any, Tensor]:
    inputs, tokens = prompts()
    return {**inputs, "labels": tokens}, tokens


def balanced(outputs: Any, _: Tensor) -> Any:
    """The loss of the tokens and of the balance of the experts, over the tokens of a record."""
    assert outputs.aux_loss is not None
    return outputs.loss


def photographs() -> tuple[Any, Tensor]:
    return {"pixel_values": torch.randn(RECORDS, 3, 8, 8)}, labels()


def recordings() -> tuple[Any, Tensor]:
    return {"input_values": torch.randn(RECORDS, 64)}, labels()


def features() -> tuple[Any, Tensor]:
    tokens = torch.randint(3, 20, (RECORDS, 5))
    return {"input_features": torch.randn(RECORDS, 8, 8), "decoder_input_ids": tokens}, tokens


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    model = pretrained("GPT2", "LMHeadModel", GPT2)
    settings = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = peft.get_peft_model(model, settings)
    for name, value in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(value)
    trained: nn.Module = model
    return trained


GPT2 = {
    "vocab_size": 20, "n_positions": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DISTIL = {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}
ONE_KEY = {"num_key_value_heads": 1, "head_dim": 4}
CLASSIFIER, GENERATOR = "ForSequenceClassification", "ForCausalLM"
# fmt: off
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], Any, Any]] = {
    "BERT": ("Bert", CLASSIFIER, TEXT, {}, label, reviews),
    "BERT, masked words": ("Bert", "ForMaskedLM", TEXT, {}, next_word, prompts),
    "BERT, its own loss": ("Bert", CLASSIFIER, TEXT, {}, lambda o, _: o.loss, labelled_reviews),
    "RoBERTa": ("Roberta", CLASSIFIER, TEXT, {}, label, reviews),
    "DistilBERT": ("DistilBert", CLASSIFIER, TEXT, DISTIL, label, reviews),
    "ALBERT": ("Albert", CLASSIFIER, TEXT, {"embedding_size": 4}, label, reviews),
    "ELECTRA": ("Electra", CLASSIFIER, TEXT, {"embedding_size": 4}, label, reviews),
    "DeBERTa": ("DebertaV2", CLASSIFIER, TEXT, {"relative_attention": True}, label, reviews),
    "ModernBERT": ("ModernBert", CLASSIFIER, TEXT, {"cls_token_id": 1, "sep_token_id": 2}, label,
        reviews),
    "XLNet": ("XLNet", CLASSIFIER, {"vocab_size": 20, "num_labels": 3}, {"d_model": 8, "n_layer": 1,
        "n_head": 2, "d_inner": 8}, label, reviews),
    "GPT-2": ("GPT2", "LMHeadModel", GPT2, {}, next_word, prompts),
    "GPT-NeoX": ("GPTNeoX", GENERATOR, TEXT, {}, next_word, prompts),
    "OPT": ("OPT", GENERATOR, TEXT, {"word_embed_proj_dim": 8, "ffn_dim": 8}, next_word, prompts),
    "BLOOM": ("Bloom", GENERATOR, {"vocab_size": 20, "hidden_size": 8, "n_layer": 1, "n_head": 2}, {},
        next_word, prompts),
    "Llama": ("Llama", GENERATOR, TEXT, ONE_KEY, next_word, prompts),
    "Mistral": ("Mistral", GENERATOR, TEXT, {**ONE_KEY, "sliding_window": 3}, next_word, prompts),
    "Qwen": ("Qwen2", GENERATOR, TEXT, ONE_KEY, next_word, prompts),
    "Gemma": ("Gemma", GENERATOR, TEXT, ONE_KEY, next_word, prompts),
    "Phi": ("Phi", GENERATOR, TEXT, {}, next_word, prompts),
    "Falcon": ("Falcon", GENERATOR, TEXT, {}, next_word, prompts),
    "Mixtral": ("Mixtral", GENERATOR, TEXT, {**ONE_KEY, "num_local_experts": 3}, next_word, prompts),
    "Mixtral, best one": ("Mixtral", GENERATOR, TEXT, {**ONE_KEY, "num_local_experts": 3,
        "num_experts_per_tok": 1}, next_word, prompts),
    "Mixtral, balanced": ("Mixtral", GENERATOR, TEXT, {**ONE_KEY, "num_local_experts": 3,
        "output_router_logits": True}, balanced, labelled_prompts),
    "RecurrentGemma": ("RecurrentGemma", GENERATOR, TEXT, {**ONE_KEY, "lru_width": 8,
        "attention_window_size": 4}, next_word, prompts),
    "Mamba": ("Mamba", GENERATOR, TEXT, {"state_size": 4}, next_word, prompts),
    "T5": ("T5", "ForConditionalGeneration", {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8},
        {"num_layers": 1, "num_heads": 2}, next_word, answers),
    "BART": ("Bart", "ForConditionalGeneration", BOTH, {}, next_word, answers),
    "Whisper": ("Whisper", "ForConditionalGeneration", {k: v for k, v in BOTH.items() if k !=
        "max_position_embeddings"}, {"num_mel_bins": 8, "max_source_positions": 4,
        "max_target_positions": 12}, next_word, features),
    "ViT": ("ViT", "ForImageClassification", VISION, {}, label, photographs),
    "DeiT": ("DeiT", "ForImageClassification", VISION, {}, label, photographs),
    "DINOv2": ("Dinov2", "ForImageClassification", VISION, {"mlp_ratio": 1}, label, photographs),
    "Swin": ("Swin", "ForImageClassification", {"image_size": 8, "patch_size": 2, "num_labels": 3},
        {"embed_dim": 8, "depths": [1], "num_heads": [2], "window_size": 2}, label, photographs),
    "ConvNeXt": ("ConvNext", "ForImageClassification", {"num_labels": 3}, {"patch_size": 2,
        "hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2}, label, photographs),
    "wav2vec2": ("Wav2Vec2", CLASSIFIER, SPEECH, {"mask_time_prob": 0.0}, label, recordings),
    "HuBERT": ("Hubert", CLASSIFIER, SPEECH, {"mask_time_prob": 0.0}, label, recordings),
}
# fmt: on


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face(name: str) -> None:
    model, task, settings, own, loss, data = HUGGING_FACE[name]
    # the products of Mixtral's experts have no kernel for double precision
    dtype = torch.float32 if model == "Mixtral" else torch.float64
    check((lambda: pretrained(model, task, settings, **own), loss, data), dtype=dtype)


def test_lora() -> None:
    check((lora, next_word, text))


# fmt: off
HUGGING_FACE_DRAWS: dict[str, tuple[str, str, Any, Any, Any]] = {
    "BERT, dropout": ("Bert", CLASSIFIER, TEXT, label, reviews),
    "XLNet, dropout, reduced loss": ("XLNet", CLASSIFIER, {"vocab_size": 20, "num_labels": 3, "d_model":
        8, "n_layer": 1, "n_head": 2, "d_inner": 8}, lambda o, y: F.cross_entropy(o.logits, y), reviews),
    "OPT, layers dropped": ("OPT", GENERATOR, {**TEXT, "layerdrop": 0.5, "ffn_dim": 8,
        "word_embed_proj_dim": 8}, next_word, prompts),
    "wav2vec2, masked": ("Wav2Vec2", CLASSIFIER, {**SPEECH, "mask_time_length": 2}, label, recordings),
    "HuBERT, masked": ("Hubert", CLASSIFIER, {**SPEECH, "mask_time_length": 2}, label, recordings),
}
# fmt: on


@pytest.mark.parametrize("name", HUGGING_FACE_DRAWS)
def test_hugging_face_that_draws(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, task, settings, loss, data = HUGGING_FACE_DRAWS[name]

    def make() -> nn.Module:
        config = getattr(transformers, f"{model}Config")(**settings)
        return getattr(transformers, f"{model}{task}")(config)  # type: ignore[no-any-return]

    check((make, loss, data), draws=True)
