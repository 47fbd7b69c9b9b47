"""Hugging Face transformers: a Trainer with a private step. docs/transformers.md."""

from hush.integrations.transformers.trainer import PrivateTrainer, vectorize_attention

__all__ = ["PrivateTrainer", "vectorize_attention"]
