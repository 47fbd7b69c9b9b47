"""Where random numbers come from: the one source that is passed down."""

import os
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from hush.core.errors import InvalidValue, Unsupported
from hush.core.kind import check_kind

if TYPE_CHECKING:
    import torch

# torch's CPU generator (a Mersenne twister): three 8-byte words, then 624 that hold 32 bits each.
_STATE_BYTES = 5056
_TWISTER = slice(3, 627)


@dataclass(frozen=True)
class SystemSource:
    """The operating system's cryptographic source, for numbers on `device`.

    It has no state to keep or repeat: every number comes from `os.urandom`.
    """

    device: "torch.device"


Randomness: TypeAlias = "torch.Generator | SystemSource"


def source_for(
    device: "torch.device", generator: "torch.Generator | None", *, secure: bool
) -> Randomness:
    """The generator given, or a new source for that device."""
    import torch

    if generator is not None:
        check_kind("generator", generator, torch.Generator)
        if any(generator is each for each in (torch.default_generator, *torch.cuda.default_generators)):
            raise InvalidValue(
                "generator is torch's own, which everything draws from: published weights, or a "
                "torch.manual_seed in the program, would tell the noise. Leave generator out, or pass "
                "torch.Generator() seeded with a secret.",
                key="generator",
            )
    if not secure:
        return fresh_generator(device) if generator is None else generator
    if generator is not None:
        raise InvalidValue(
            "secure=True takes all randomness from the operating system, and a generator was passed as "
            "well: its draws could be repeated by whoever knows its state. Pass one of the two.",
            key="secure",
        )
    return SystemSource(device)


def random_bits(count: int, source: Randomness) -> "torch.Tensor":
    """So many 64-bit integers, every bit of them random, on the source's device."""
    import torch

    if isinstance(source, SystemSource):
        words = np.frombuffer(bytearray(os.urandom(8 * count)), dtype=np.int64)
        return torch.from_numpy(words).to(source.device)
    empty = torch.empty(count, dtype=torch.int64, device=source.device)
    return empty.random_(-(2**63), None, generator=source)


def seed_from(source: Randomness) -> int:
    """A seed for another generator."""
    return int(random_bits(1, source)) & 2**62 - 1


def uniform(count: int, source: Randomness) -> "torch.Tensor":
    """So many numbers, evenly spread over [0, 1), in double precision: multiples of 2**-53."""
    import torch

    if isinstance(source, SystemSource):
        return (random_bits(count, source) >> 11 & 2**53 - 1).to(torch.float64).mul_(2.0**-53)
    return torch.rand(count, generator=source, device=source.device, dtype=torch.float64)


def fresh_generator(device: "torch.device | str" = "cpu") -> "torch.Generator":
    """A generator whose state cannot be guessed, seeded by the operating system.

    On the CPU a seed is not enough: torch keeps 32 bits of it, so the noise of a whole run would be
    one of four billion, which a patient attacker tries one after another. The twister's whole state
    is drawn instead. Other devices use 64 bits of seed. None of these generators is cryptographic:
    who learns some thousand of its exact draws can compute the others. `SystemSource` is.
    """
    import torch

    seed = secrets.randbits(63)
    generator = torch.Generator(device).manual_seed(seed)
    if generator.device.type != "cpu":
        return generator
    state = generator.get_state().numpy().copy()
    words = state.view(np.uint64)[_TWISTER] if len(state) == _STATE_BYTES else np.zeros(1, np.uint64)
    if words[0] != seed % 2**32:
        raise Unsupported(
            f"torch {torch.__version__} keeps its random state in a way hush does not know, and 32 bits "
            "of seed can be guessed. Pass a generator of your own making, or another torch version."
        )
    words[:] = np.frombuffer(secrets.token_bytes(4 * len(words)), dtype=np.uint32)
    return generator.set_state(torch.from_numpy(state))
