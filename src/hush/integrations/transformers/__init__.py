"""Hugging Face transformers: a Trainer whose step is private. docs/transformers.md."""

from hush.integrations.transformers.attention import vectorize_attention
from hush.integrations.transformers.trainer import PrivateTrainer

__all__ = ["PrivateTrainer", "vectorize_attention"]
