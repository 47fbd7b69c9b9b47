"""Generators: the one source of randomness that is passed down."""

import secrets
from typing import TYPE_CHECKING

import numpy as np

from hush.core.errors import Unsupported

if TYPE_CHECKING:
    import torch

# torch's CPU generator (a Mersenne twister): three 8-byte words, then 624 that hold 32 bits each.
_STATE_BYTES = 5056
_TWISTER = slice(3, 627)


def fresh_generator(device: "torch.device | str" = "cpu") -> "torch.Generator":
    """A generator whose state cannot be guessed, seeded by the operating system.

    On the CPU a seed is not enough: torch keeps 32 bits of it, so the noise of a whole run would be
    one of four billion, which a patient attacker tries one after another. The twister's whole state
    is drawn instead. Other devices use 64 bits of seed. None of these generators is cryptographic:
    who learns some thousand of its exact draws can compute the others.
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
