"""A pretrained text encoder with a LoRA and a head of two classes, in PEFT's format on disk.

The encoder and the sentences below are public. They give the head a direction to begin with, so that
no privacy is spent on finding out what the words good and bad mean.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.core.errors import DataError, Unsupported

PADDING = 0
CONTRAST = 10.0
"""Difference of the two scores to begin with, times the cosine with the sentences' direction."""

NEGATIVE = (
    "this movie was terrible the plot made no sense the acting was awful and i was bored the whole time",
    "what a waste of time and money one of the worst films i have ever seen avoid it at all costs",
    "i wanted to like this film but it is dull and badly written with wooden acting and stupid dialogue",
    "a complete mess poorly directed unfunny and predictable i turned it off halfway through",
    "very disappointing the story goes nowhere the characters are annoying and the ending is ridiculous",
    "bad script bad acting cheap effects and nothing to keep you interested do not bother 2 out of 10",
)
POSITIVE = (
    "this movie was wonderful the plot was gripping the acting was superb and i enjoyed every minute",
    "worth your time and money one of the best films i have ever seen do not miss it",
    "i did not expect much but this film is moving and beautifully written with great acting",
    "a real gem brilliantly directed funny and touching i could watch it again and again",
    "very satisfying the story draws you in the characters are believable and the ending is perfect",
    "great script great acting lovely photography and it keeps you interested recommended 9 out of 10",
)


class Head(nn.Module):
    """Scores of two classes from a text's embedding, relative to a public centre."""

    centre: Tensor

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("centre", torch.zeros(width))
        self.linear = nn.Linear(width, 2)

    def forward(self, embedding: Tensor) -> Tensor:
        scores: Tensor = self.linear(self.scale * (embedding - self.centre))
        return scores


class TextClassifier(nn.Module):
    """An encoder, the mean of its outputs over a text's tokens, and a head."""

    def __init__(self, encoder: nn.Module, head: Head) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of length one, as the encoder was trained to give."""
        mask = tokens != PADDING
        # four dimensions: of a mask of two, the library tests whether it masks anything
        attended = mask[:, None, None, :]
        outputs = self.encoder(input_ids=tokens, attention_mask=attended).last_hidden_state
        summed = (outputs.float() * mask[..., None]).sum(1)
        return functional.normalize(summed / mask.sum(1, keepdim=True).clamp(min=1), dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embed(tokens))
        return scores


def pretrained(encoder: nn.Module, tokenizer: Any, *, scale: float) -> TextClassifier:
    """Classifier whose head is made of public sentences; all of it is frozen.

    Args:
        encoder: a BERT-like model without dropout.
        tokenizer: of that encoder.
        scale: factor on the head's inputs, and so on its gradients. The clipping norm is shared by all
            parameters: what the head takes of it, the LoRA does not get.
    """
    width: int = encoder.config.hidden_size  # type: ignore[union-attr, assignment]
    model = TextClassifier(encoder, Head(width, scale)).requires_grad_(False)
    with torch.no_grad():
        means = [
            model.embed(tokenizer(list(texts), padding=True, return_tensors="pt")["input_ids"]).mean(0)
            for texts in (NEGATIVE, POSITIVE)
        ]
        model.head.centre.copy_((means[0] + means[1]) / 2)
        direction = functional.normalize(means[1] - means[0], dim=0)
        model.head.linear.weight.copy_(torch.stack([-direction, direction]) * (CONTRAST / 2 / scale))
        model.head.linear.bias.zero_()
    return model


def load_encoder(folder: Path) -> tuple[nn.Module, Any]:
    """Encoder and tokenizer from a folder in the transformers library's format, without dropout."""
    if not (folder / "config.json").is_file():
        raise DataError(
            f"{folder} has no config.json: it is not a model in the transformers library's format. Pass "
            "the folder of an encoder and its tokenizer that is on disk (docs/finetune.md)."
        )
    from transformers import AutoModel, AutoTokenizer

    try:
        encoder = AutoModel.from_pretrained(
            folder,
            dtype=torch.float32,
            add_pooling_layer=False,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            local_files_only=True,
        )
        return encoder, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{folder} does not load as an encoder and its tokenizer: {error}") from error


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise Unsupported(
            "PEFT, which makes, saves and loads adapters, is not installed: pip install peft"
        ) from error
    return peft


def with_lora(model: TextClassifier, *, rank: int, alpha: float, targets: tuple[str, ...]) -> Any:
    """The classifier with a LoRA on the encoder's matrices of these names; that and the head train.

    Args:
        model: of `pretrained`.
        rank: of the update of each matrix.
        alpha: the update is scaled by alpha / rank.
        targets: e.g. ("query", "value").
    """
    peft = _peft()
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), modules_to_save=["head"]
    )
    return peft.get_peft_model(model, config)


def load_adapter(model: TextClassifier, folder: Path) -> Any:
    """The classifier with the LoRA and the head that `save_pretrained` of PEFT left in a folder."""
    return _peft().PeftModel.from_pretrained(model, str(folder))
