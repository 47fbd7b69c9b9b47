"""Made-up reviews in files, of different lengths."""

import random
from pathlib import Path


def write_reviews(folder: Path, train: int = 1024, test: int = 256) -> None:
    """Reviews whose sentiment is in some of their words."""
    source = random.Random(0)
    fillers = [f"word{number}" for number in range(40)]
    tellers = {"pos": ["good", "fine", "moving", "warm"], "neg": ["bad", "dull", "cold", "long"]}
    for part, number in (("train", train), ("test", test)):
        for label, words in tellers.items():
            (folder / part / label).mkdir(parents=True)
            for review in range(number // 2):
                text = source.choices(fillers, k=source.randint(1, 20))
                text += source.choices(words, k=source.randint(1, 12))
                source.shuffle(text)
                (folder / part / label / f"{review}.txt").write_text(" ".join(text))
