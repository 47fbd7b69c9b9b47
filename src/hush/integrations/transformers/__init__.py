"""Hugging Face transformers: a Trainer whose step is private. docs/transformers.md."""

from hush.integrations.transformers.trainer import PrivateTrainer, vectorize_attention

__all__ = ["PrivateTrainer", "vectorize_attention"]
