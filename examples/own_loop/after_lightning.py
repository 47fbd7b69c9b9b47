"""Sentiment of reviews in text files, each review protected: python after_lightning.py FOLDER

FOLDER/train and FOLDER/test have the subfolders pos and neg.
"""

import sys
import zlib
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import hush
from hush.integrations.lightning import PoissonLoader, PrivateModule

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


class Training(lightning.LightningModule):
    def __init__(self, steps):
        super().__init__()
        self.model, self.loss, self.steps = Classifier(), nn.CrossEntropyLoss(), steps

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return self.loss(self.model(**inputs), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PrivateTraining(PrivateModule, Training):
    pass


class Average(lightning.Callback):
    def on_fit_start(self, trainer, module):
        self.model = AveragedModel(module.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def on_train_batch_end(self, trainer, module, *_):
        self.model.update_parameters(module.model)


def accuracy(model, reviews):
    right = 0
    with torch.no_grad():
        for inputs, labels in DataLoader(reviews, batch_size=MICROBATCH, collate_fn=collate):
            right += int((model(**inputs).argmax(1) == labels).sum())
    return right / len(reviews)


def main(folder):
    train, test = Reviews(f"{folder}/train"), Reviews(f"{folder}/test")
    steps = EPOCHS * len(train) // BATCH
    plan = hush.Plan(
        sampling=hush.Poisson(rate=BATCH / len(train)),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=1.0),
    )
    plan = hush.calibrate(plan, BUDGET, steps=steps)
    loader = PoissonLoader(
        train,
        plan,
        BUDGET,
        collate_fn=collate,
        workers=2,
        pad_to=(LENGTH, None),
        physical_batch=MICROBATCH,
    )
    average = Average()
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[average], default_root_dir=folder, logger=False, accelerator="cpu"
    )
    trainer.fit(PrivateTraining(steps), loader)
    print(loader.spent())
    return accuracy(average.model, test)


if __name__ == "__main__":
    print(f"accuracy {main(sys.argv[1]):.3f}")
