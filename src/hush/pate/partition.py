"""Which teacher each record goes to."""

import hashlib

import torch
from torch import Tensor

from hush.core.errors import DataError
from hush.core.ranges import check_count


def teacher_of(inputs: Tensor, targets: Tensor, teachers: int) -> Tensor:
    """The number of the teacher that each record goes to, decided by the record alone.

    A hash of the record's content, so that adding or removing a record moves no other one: it
    changes one teacher. Shares cut by position would all shift. They are of about equal size.
    """
    check_teachers(teachers, len(inputs))
    return torch.tensor(
        [
            _number(record.numpy().tobytes() + int(target).to_bytes(8)) % teachers
            for record, target in zip(inputs.cpu(), targets.tolist(), strict=True)
        ]
    )


def check_teachers(teachers: int, records: int) -> None:
    """Raise unless so many teachers can share the records."""
    check_count("teachers", teachers, "one teacher's vote is what noise hides", at_least=2)
    if teachers > records:
        raise DataError(
            f"teachers={teachers} is more than the {records} records: most teachers would have learned "
            f"nothing, and their votes drown the others. Pass e.g. teachers={max(2, records // 20)}."
        )


def _number(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
