"""Architectures that people train, with random weights: BERT, ViT, ResNets, GPT-2, a Llama of 1.1B.

`peer` makes the changes that Opacus and fastDP need, and that hush does not: positions are expanded to
the batch, attention is made of linear layers, additions are not in place, and parameters that belong to
no layer (a ViT's class token and positions) are frozen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

RANK = 8
CLASSES = 10


@dataclass(frozen=True)
class Options:
    """What a network is built for."""

    peer: bool = False
    dropout: bool = False
    """Keep the dropout that the architecture has by default."""
    small: bool = False
    """Two layers, 32 wide: to try the benchmark itself."""


class NextToken(nn.Module):
    """Cross-entropy of a record's next tokens, averaged over its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, logits: Tensor, tokens: Tensor) -> Tensor:
        by_token = cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        by_record = by_token.mean(1)
        return by_record.mean() if self.reduction == "mean" else by_record


class Logits(nn.Module):
    """Logits of a Hugging Face model of tokens."""

    def __init__(self, model: nn.Module, peer: bool) -> None:
        super().__init__()
        self.model, self.peer = model, peer

    def forward(self, tokens: Tensor) -> Tensor:
        positions = None
        if self.peer:  # one row of positions has no batch to take per-sample gradients over
            positions = (
                torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
            )
        logits: Tensor = self.model(input_ids=tokens, position_ids=positions).logits
        return logits


class LowRank(nn.Module):
    """A frozen linear layer and its LoRA update."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.up(self.down(x))
        return self.base(x) + update


def add_lora(model: nn.Module, targets: tuple[str, ...], trained: tuple[str, ...] = ()) -> nn.Module:
    """Freeze a model but for LoRA updates of the layers named, and for the modules `trained`."""
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, child = name.rpartition(".")
        if child in targets:
            setattr(model.get_submodule(parent), child, LowRank(module))
        elif child in trained:
            module.requires_grad_(True)
    return model


class LinearAttention(nn.Module):
    """Self-attention of linear layers, in the place of `nn.MultiheadAttention`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, *_: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        query, key, value = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value)
        return self.outward(mixed.transpose(1, 2).flatten(2)), None


def bert(options: Options) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    settings: dict[str, Any] = {"num_labels": CLASSES}
    if options.small:
        settings |= _TINY | {"num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}
    if not options.dropout:
        settings |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return Logits(BertForSequenceClassification(BertConfig(**settings)), options.peer)


def bert_lora(options: Options) -> nn.Module:
    return add_lora(bert(options), ("query", "value"), trained=("classifier",))


def gpt2(options: Options) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    settings: dict[str, Any] = {"use_cache": False}
    if options.small:
        settings |= {"vocab_size": _VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2}
        settings |= {"bos_token_id": 0, "eos_token_id": 0}
    if not options.dropout:
        settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Logits(GPT2LMHeadModel(GPT2Config(**settings)), options.peer)


def llama_lora(options: Options) -> nn.Module:
    """A decoder of 1.1 billion parameters in bfloat16 (TinyLlama's shape), with LoRA in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {"intermediate_size": 5632, "num_hidden_layers": 22}
    settings |= {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}
    if options.small:
        settings |= _TINY | {"num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2}
        settings |= {"num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(use_cache=False, **settings)).to(torch.bfloat16)
    return add_lora(Logits(model, options.peer), ("q_proj", "v_proj"))


def llama_qlora(options: Options) -> nn.Module:
    """The same with the frozen linear layers of its decoder blocks in 4 bits (bitsandbytes, NF4)."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    model = llama_lora(options)
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or ".layers." not in name or module.weight.requires_grad:
            continue
        small = Linear4bit(
            *(module.in_features, module.out_features),
            bias=module.bias is not None,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
        )
        weight = Params4bit(module.weight.detach(), requires_grad=False, quant_type="nf4")
        small.weight = weight.to("cpu")  # which quantizes it
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, small)
    return model


def vit(options: Options) -> nn.Module:
    from torchvision.models import VisionTransformer

    size, layers, heads, width = (32, 2, 2, 32) if options.small else (224, 12, 12, 768)
    model: nn.Module = VisionTransformer(size, 16, layers, heads, width, 4 * width, num_classes=CLASSES)
    # torchvision starts the last layer at zero, where nothing else has a gradient
    nn.init.normal_(model.get_submodule("heads.head").weight, std=0.02)
    if options.peer:
        for block in model.get_submodule("encoder.layers").children():
            block.self_attention = LinearAttention(width, heads)
        for name in ("class_token", "encoder.pos_embedding"):
            model.get_parameter(name).requires_grad_(False)
    return model


def residual(block: Any, x: Tensor) -> Tensor:
    """What a block of torchvision's ResNet does, with an addition that is not in place."""
    inner = block.relu(block.bn1(block.conv1(x)))
    inner = block.bn2(block.conv2(inner))
    if hasattr(block, "conv3"):
        inner = block.bn3(block.conv3(block.relu(inner)))
    shortcut = x if block.downsample is None else block.downsample(x)
    total: Tensor = block.relu(inner + shortcut)
    return total


def resnet(name: str) -> Callable[[Options], nn.Module]:
    def network(options: Options) -> nn.Module:
        from torchvision import models

        def norm(channels: int) -> nn.Module:
            return nn.GroupNorm(32, channels)

        if options.small:
            block = models.resnet.BasicBlock if name == "resnet18" else models.resnet.Bottleneck
            model: nn.Module = models.ResNet(block, [1, 1, 1, 1], CLASSES, norm_layer=norm)
        else:
            model = models.get_model(name, num_classes=CLASSES, norm_layer=norm)
        if options.peer:
            for module in model.modules():
                if isinstance(module, nn.ReLU):
                    module.inplace = False
                elif isinstance(module, (models.resnet.BasicBlock, models.resnet.Bottleneck)):
                    module.forward = partial(residual, module)
        return model

    return network


@dataclass(frozen=True)
class Architecture:
    """A network, and the logical batch that it is trained on."""

    network: Callable[[Options], nn.Module]
    vocabulary: int | None = None
    """None: it takes images of 224 x 224 pixels."""
    generates: bool = False
    """Whether it is trained to tell the next token."""
    logical: int = 256
    physical: int = 256
    tokens: int = 128
    bfloat16_only: bool = False

    @property
    def loss(self) -> nn.Module:
        return NextToken() if self.generates else nn.CrossEntropyLoss()

    def batch(self, records: int, small: bool) -> tuple[Tensor, Tensor]:
        """Made-up inputs and targets."""
        if self.vocabulary is None:
            size = 32 if small else 224
            return torch.randn(records, 3, size, size), torch.randint(0, CLASSES, (records,))
        length, words = (8, _VOCABULARY) if small else (self.tokens, self.vocabulary)
        tokens = torch.randint(1, words, (records, length))
        return tokens, tokens if self.generates else torch.randint(0, CLASSES, (records,))


_VOCABULARY = 100
_TINY = {"vocab_size": _VOCABULARY, "hidden_size": 32}

ARCHITECTURES = {
    "BERT-base": Architecture(bert, vocabulary=30522),
    "BERT-base, LoRA": Architecture(bert_lora, vocabulary=30522),
    "ViT-B/16": Architecture(vit),
    "ResNet-18": Architecture(resnet("resnet18")),
    "ResNet-50": Architecture(resnet("resnet50")),
    "GPT-2": Architecture(gpt2, vocabulary=50257, generates=True, physical=64),
    "Llama-1.1B, LoRA": Architecture(
        llama_lora,
        vocabulary=32000,
        generates=True,
        logical=1024,
        physical=16,
        tokens=512,
        bfloat16_only=True,
    ),
    "Llama-1.1B, QLoRA": Architecture(
        llama_qlora,
        vocabulary=32000,
        generates=True,
        logical=1024,
        physical=16,
        tokens=512,
        bfloat16_only=True,
    ),
}
