"""Sentiment of reviews in text files, each review protected: python after.py FOLDER

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

import hush

WORDS, BATCH, MICROBATCH, EPOCHS = 1024, 256, 64, 10
LENGTH, BUDGET = 32, hush.Budget(epsilon=8.0, delta=1e-4)


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
    return {"words": words, "mask": words > 0}, torch.tensor([label for _, label in reviews])


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
        for inputs, labels in DataLoader(reviews, batch_size=MICROBATCH, collate_fn=collate):
            right += int((model(**inputs).argmax(1) == labels).sum())
    return right / len(reviews)


def main(folder):
    train, test = Reviews(f"{folder}/train"), Reviews(f"{folder}/test")
    model = Classifier()
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.01)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    steps = EPOCHS * len(train) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    plan = hush.Plan(
        sampling=hush.Poisson(rate=BATCH / len(train)),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=1.0),
    )
    plan = hush.calibrate(plan, BUDGET, steps=steps)
    execution = hush.Execution(physical_batch=MICROBATCH)
    step = hush.PrivateStep(model, loss, optimizer, plan, records=len(train), execution=execution)
    source = hush.Source(train, collate_fn=collate, workers=2, pad_to=(LENGTH, None))
    for batch in step.batches(source, steps):
        step(batch)
        schedule.step()
        average.update_parameters(model)
    print(step.spent(BUDGET.delta))
    return accuracy(average, test)


if __name__ == "__main__":
    print(f"accuracy {main(sys.argv[1]):.3f}")
