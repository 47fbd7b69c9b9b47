"""State of a Trainer: attributes in which a loss of private records must leave nothing.

A metric that `compute_loss` puts aside, to be logged later, is released without a charge. The modules of
the model are watched by the private step itself; the Trainer is none of them.
"""

from typing import Any

from hush.core.errors import Unsupported
from hush.gradients.checks.attribute_contents import AttributeReader, Content

_MAX_ENTRIES = 4096
"""Longer lists are told from one another by their length."""
_NOT_WATCHED = ("train_dataset", "eval_dataset", "data_collator", "processing_class")
"""What holds records, which take long to read, or makes batches of them, which is not done here."""
_LIBRARIES = ("transformers", "accelerate", "peft", "torch", "hush")
"""Libraries whose objects compute_loss does not put metrics in."""


def state_of_trainer(trainer: Any) -> dict[str, Content]:
    """Contents of a Trainer's attributes: numbers, tensors, containers, and objects of a user's own.

    Args:
        trainer: before or after the loss of a record is computed.
    """
    reader = AttributeReader(_MAX_ENTRIES, by_identity=False, visited=set())
    return {
        name: reader.content(value, type(value).__module__.split(".")[0] not in _LIBRARIES)
        for name, value in vars(trainer).items()
        if name not in _NOT_WATCHED
    }


def check_state_unchanged(before: dict[str, Content], after: dict[str, Content]) -> None:
    """Raise if the loss of a record has left something in the Trainer.

    Args:
        before: `state_of_trainer` before it was computed.
        after: the same, after it.
    """
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed:
        raise Unsupported(
            f"compute_loss changes {', '.join(sorted(changed)[:3])} of the Trainer: what it keeps of "
            "private records, or how many they were, would be logged or saved without a charge. "
            "Compute metrics of evaluation records, and keep nothing between calls."
        )
