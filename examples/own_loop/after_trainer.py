"""Sentiment of reviews in text files, each review protected: python after_trainer.py FOLDER

FOLDER/train and FOLDER/test have the subfolders pos and neg.
"""

import sys
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from transformers import TrainerCallback, TrainingArguments

from hush.integrations.transformers import PrivateTrainer

WORDS, BATCH, MICROBATCH, EPOCHS = 1024, 256, 64, 10
LENGTHS, EPSILON, DELTA = {"words": 32, "mask": 32}, 8.0, 1e-4


class Reviews(Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*/*.txt"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        words = self.files[index].read_text().split()
        numbers = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
        return torch.tensor(numbers), int(self.files[index].parent.name == "pos")


def collate(reviews):
    words = pad_sequence([words for words, _ in reviews], batch_first=True)
    labels = torch.tensor([label for _, label in reviews])
    return {"words": words, "mask": words > 0, "labels": labels}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.scores = nn.Linear(16, 2)

    def forward(self, words, mask):
        mask = mask.unsqueeze(-1)
        return self.scores((self.embedding(words) * mask).sum(1) / mask.sum(1))


def accuracy(model, reviews):
    right = 0
    with torch.no_grad():
        for inputs in DataLoader(reviews, batch_size=MICROBATCH, collate_fn=collate):
            labels = inputs.pop("labels")
            right += int((model(**inputs).argmax(1) == labels).sum())
    return right / len(reviews)


class Average(TrainerCallback):
    def __init__(self, model):
        self.model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def on_step_end(self, args, state, control, model, **_):
        self.model.update_parameters(model)


def main(folder):
    train, test = Reviews(f"{folder}/train"), Reviews(f"{folder}/test")
    model = Classifier()
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.01)
    steps = EPOCHS * len(train) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    average = Average(model)
    arguments = TrainingArguments(
        f"{folder}/run",
        max_steps=steps,
        per_device_train_batch_size=MICROBATCH,
        gradient_accumulation_steps=BATCH // MICROBATCH,
        dataloader_num_workers=2,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    trainer = PrivateTrainer(
        model,
        arguments,
        data_collator=collate,
        train_dataset=train,
        compute_loss_func=lambda scores, labels, num_items_in_batch: loss(scores, labels),
        callbacks=[average],
        optimizers=(optimizer, schedule),
        epsilon=EPSILON,
        delta=DELTA,
        pad_to=LENGTHS,
    )
    trainer.train()
    print(trainer.spent())
    return accuracy(average.model, test)


if __name__ == "__main__":
    print(f"accuracy {main(sys.argv[1]):.3f}")
