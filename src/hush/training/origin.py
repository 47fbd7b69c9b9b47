"""Identity of a run in its checkpoint: what its records are like, which they are, and its seed."""

import hashlib
import hmac
import secrets
from typing import Any

import torch
from torch import Tensor

from hush.core.errors import CheckpointError
from hush.core.randomness import Stream
from hush.gradients.tree import tree_leaves
from hush.training.data import Data, describe_record, held_slots, take

_FIRST = 8
"""Records that tell one data set from another."""


def origin_of(
    data: Data, generator: torch.Generator | None, *, secure: bool, salt: str | None = None
) -> dict[str, Any]:
    """Origin of a run, for its checkpoint alone: shapes and dtypes, keyed digests of records and seed.

    A digest tells whoever has the checkpoint, and with it the key, whether a guess of a record or of the
    seed is right. The generator's state in the same file tells more, except in a secure run, whose
    checkpoint has none: there the records leave no digest.

    Args:
        data: the private records; those of a data set that draws under public random numbers.
        generator: as passed to the run; its seed counts, not how much was drawn from it.
        secure: whether the run keeps no state of its randomness.
        salt: key of the digests; None: a new one.
    """
    key = secrets.token_hex(32) if salt is None else salt
    rows = [] if secure else _first_rows(data)
    seed = None if generator is None else str(generator.initial_seed()).encode()
    return {
        "salt": key,
        "record": describe_record(data) if held_slots(data) else None,  # a rank may hold none
        "first": _digest(key, b"".join(map(_bytes, rows))) if rows else None,
        "seed": None if seed is None else _digest(key, seed),
    }


def check_same_origin(
    stored: Any, data: Data, generator: torch.Generator | None, *, secure: bool
) -> None:
    """Raise if a checkpoint is of a run on other data, or from another seed than the one passed.

    Whether this raises depends on the private records. It is a guard against a mistake, to stop a run
    before anything is released, and not part of what is released.

    Args:
        stored: `origin_of` the run as it began, from its checkpoint.
        data: to go on with.
        generator: to go on with; None: the run's own randomness, whatever seeded it.
        secure: as the run began.
    """
    if not isinstance(stored, dict) or not isinstance(stored.get("salt"), str):
        raise CheckpointError(
            "the checkpoint does not say which data the run is of: on other records it would go on as "
            "another run under the same charges. Start a new run in a new directory."
        )
    current = origin_of(data, generator, secure=secure, salt=stored["salt"])
    kinds = stored.get("record"), current["record"]
    if None not in kinds and kinds[0] != kinds[1]:
        raise CheckpointError(
            f"the checkpoint is of a run on records of {kinds[0]} and these are {kinds[1]}: {_OTHER}"
        )
    if None not in (stored.get("first"), current["first"]) and stored["first"] != current["first"]:
        raise CheckpointError(
            f"the first {_FIRST} records are not those that the run began with (they are private and "
            f"not shown): {_OTHER}"
        )
    if generator is not None and stored.get("seed") != current["seed"]:
        began = "the operating system's randomness" if stored.get("seed") is None else "another seed"
        raise CheckpointError(
            f"the run began with {began}, not with the seed {generator.initial_seed()}: a resumed run "
            "goes on with the randomness in its checkpoint, and the seed would be ignored. Leave it "
            "out, or start a new run in a new directory."
        )


_OTHER = (
    "it would go on as another run, whose accuracy and charges belong to two data sets. Resume with the "
    "data it began with, in the same order, or start a new run in a new directory."
)


def _first_rows(data: Data) -> list[Tensor]:
    """Tensors of the first records; a rank may hold none."""
    held = min(_FIRST, held_slots(data))
    if not held:
        return []
    first = take(data, torch.arange(held), Stream(torch.device("cpu"), bytes(32)))
    return [part for part in tree_leaves(first) if part.layout == torch.strided]


def _digest(key: str, content: bytes) -> str:
    return hmac.digest(bytes.fromhex(key), content, hashlib.sha256).hex()


def _bytes(rows: Tensor) -> bytes:
    return bytes(rows.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
