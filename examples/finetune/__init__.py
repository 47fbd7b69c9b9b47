"""Private fine-tuning of a pretrained text encoder: a LoRA and a head of classes (docs/finetune.md)."""
