"""Runs of the example on one model and one set of reviews: private, plain, and on frozen features."""

import time
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hush
from examples.finetune.classifier import TextClassifier, load_encoder, pretrained, with_lora
from examples.finetune.reviews import Reviews, load_reviews, read_reviews
from examples.finetune.training import (
    Settings,
    accuracy,
    frozen_features,
    train_plain,
    train_private,
)
from hush.core.errors import InvalidValue

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Outcome:
    """A trained model, and its accuracy in percent on records that it was not trained on."""

    model: Any
    guarantee: hush.Guarantee | None
    """None: trained without privacy."""
    accuracy: float
    seconds: float


@dataclass(frozen=True, eq=False)
class Experiment:
    """A public encoder, private reviews to train on, and reviews to evaluate on."""

    encoder: Any
    tokenizer: Any
    train: Reviews
    test: Reviews
    device: torch.device

    @classmethod
    def read(cls, model: Path, reviews: Path | None, device: str) -> "Experiment":
        """Everything from disk.

        Args:
            model: folder of the encoder.
            reviews: file that `prepare` wrote; None: the published ones below HUSH_DATA.
            device: to work on.
        """
        encoder, tokenizer = load_encoder(model)
        train, test = load_reviews(reviews) if reviews else read_reviews(tokenizer)
        return cls(encoder, tokenizer, train, test, torch.device(device))

    def held_out(self, count: int) -> "Experiment":
        """The same on training reviews alone: the first `count` take the place of the test reviews."""
        if not 1 <= count < len(self.train):
            raise InvalidValue(
                f"{count} reviews are to be held out, and must be at least 1 and fewer than the "
                f"{len(self.train)} there are, as others are trained on. Pass --held-out 1000, say."
            )
        return replace(self, test=self.train.part(0, count), train=self.train.part(count, None))

    def check(self, *runs: Settings) -> None:
        """Refuse settings that do not fit these reviews and this encoder, before any work."""
        names = [name for name, part in self.encoder.named_modules() if isinstance(part, nn.Linear)]
        longest = self.encoder.config.max_position_embeddings
        for settings in runs:
            if settings.batch > len(self.train):
                raise InvalidValue(
                    f"batch={settings.batch} must be at most {len(self.train)}, the reviews to train "
                    "on: each is drawn with the probability batch / reviews. Pass a smaller batch."
                )
            if settings.length > longest:
                raise InvalidValue(
                    f"length={settings.length} must be at most {longest}, the positions that the "
                    "encoder knows. Pass a smaller length."
                )
            for target in settings.targets:
                if not any(f".{name}".endswith(f".{target}") for name in names):
                    raise InvalidValue(
                        f"targets has {target!r}, and no linear layer of the encoder has that name: "
                        f"they are {sorted({name.split('.')[-1] for name in names})}."
                    )

    @cached_property
    def _rows(self) -> Any:
        @lru_cache(maxsize=2)
        def rows(length: int, first: int) -> tuple[Pair, Pair]:
            train, test = (
                (part.rows(length, first).to(self.device), torch.from_numpy(part.labels).to(self.device))
                for part in (self.train, self.test)
            )
            return train, test

        return rows

    def data(self, settings: Settings) -> tuple[Pair, Pair]:
        """Tokens and labels of the reviews to train on, and of those to evaluate on."""
        pairs: tuple[Pair, Pair] = self._rows(settings.length, settings.first)
        return pairs

    def classifier(self, settings: Settings) -> TextClassifier:
        """A fresh copy of the pretrained classifier, all of it frozen."""
        model = pretrained(deepcopy(self.encoder), self.tokenizer, scale=settings.head_scale)
        if not settings.sentences:
            model.head.linear.weight.zero_()
            model.head.centre.zero_()
        return model.to(self.device)

    def run(self, settings: Settings, budget: hush.Budget | None, seed: int | None) -> Outcome:
        """Train a LoRA and the head; without privacy where there is no budget.

        Args:
            settings: of the run.
            budget: None: no privacy.
            seed: makes the run repeatable, for comparisons; None: secret randomness.
        """
        begin = time.perf_counter()
        train, test = self.data(settings)
        torch.manual_seed(0 if seed is None else seed)  # of the LoRA's first weights, which are public
        model = with_lora(
            self.classifier(settings),
            rank=settings.rank,
            alpha=settings.alpha,
            targets=settings.targets,
        )
        if not settings.train_a:
            for name, value in model.named_parameters():
                if "lora_A" in name:
                    value.requires_grad_(False)
        return self._evaluated(model, train, test, settings, budget, seed, begin)

    def run_frozen(self, settings: Settings, budget: hush.Budget | None, seed: int | None) -> Outcome:
        """Train the head alone, on the encoder's embeddings."""
        begin = time.perf_counter()
        train, test = self._features(settings.length, settings.first)
        head = self.classifier(settings).head.requires_grad_(True)
        return self._evaluated(head, train, test, settings, budget, seed, begin)

    @cached_property
    def _features(self) -> Any:
        @lru_cache(maxsize=1)
        def features(length: int, first: int) -> tuple[Pair, ...]:
            model = TextClassifier(deepcopy(self.encoder), None).to(self.device)  # type: ignore[arg-type]
            return tuple((frozen_features(model, x), y) for x, y in self._rows(length, first))

        return features

    def _evaluated(
        self,
        model: Any,
        train: Pair,
        test: Pair,
        settings: Settings,
        budget: hush.Budget | None,
        seed: int | None,
        begin: float,
    ) -> Outcome:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        guarantee = None
        if budget is None:
            train_plain(model, train, settings, generator or torch.Generator())
        else:
            guarantee = train_private(model, train, settings, budget, generator)
        return Outcome(model, guarantee, accuracy(model, test), time.perf_counter() - begin)
