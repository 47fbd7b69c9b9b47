"""The frame that a run's gradients are written in, found anew from public records as the run goes."""

from typing import Any

import torch
from torch import Tensor, nn

from hush.clipping import Subspaces
from hush.core.errors import DataError
from hush.core.parts import Clipping
from hush.core.randomness import Randomness, seed_from
from hush.gradients.public_basis import PublicBasis
from hush.gradients.recording import Loss
from hush.training.data import Data
from hush.training.methods.principal import check_enough, principal_basis


class BasisSchedule:
    """Gives the frame of each step; the same one until it is time for another.

    All that a frame depends on is public: the records, released weights, and a seed of its own.
    """

    def __init__(self, model: nn.Module, loss: Loss, public: Data, clipping: Subspaces) -> None:
        assert clipping.bases is not None
        self.public = public
        self._model = model
        self._loss = loss
        self._ranks = clipping.ranks
        self._principal = clipping.bases
        self.current: PublicBasis | None = None
        self._made: dict[str, Any] = {}

    def at(self, step: int, generator: Randomness) -> PublicBasis:
        """The frame of a step, counted from 0."""
        if self.current is None or (
            step % self._principal.every == 0 and step != self._made.get("step")
        ):
            weights = {name: value.detach().clone() for name, value in self._parameters().items()}
            seed = seed_from(generator)
            self._made = {"step": step, "seed": seed, "weights": weights}
            self.current = self._found(seed)
        return self.current

    def state_dict(self) -> dict[str, Any]:
        """What the present frame was made of."""
        return self._made

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the frame again that the state was of, whatever the weights are now."""
        self._made, self.current = state, None
        if not state:
            return
        now = {name: value.detach().clone() for name, value in self._parameters().items()}
        try:
            self._set(state["weights"])
            self.current = self._found(state["seed"])
        finally:
            self._set(now)

    def _found(self, seed: int) -> PublicBasis:
        device = next(self._model.parameters()).device
        own = torch.Generator(device).manual_seed(seed)
        return principal_basis(self._model, self._loss, self.public, self._ranks, self._principal, own)

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    def _set(self, weights: dict[str, Tensor]) -> None:
        for name, value in self._parameters().items():
            value.copy_(weights[name])


def basis_schedule(
    model: nn.Module, loss: Loss, public: Data | None, clipping: Clipping
) -> BasisSchedule | None:
    """The frames that a clipping asks for, if it does."""
    wanted = isinstance(clipping, Subspaces) and clipping.bases is not None
    if wanted and public is None:
        raise DataError(
            "the clipping takes its subspaces from public gradients, and public=None: bases worked out "
            "from the private records would give them away. Pass public=(inputs, targets), records that "
            "need no protection and are not in the private set (hush train: --public-records N)."
        )
    if not wanted and public is not None:
        raise DataError(
            "public records were passed and the clipping has no use for them. Clip with "
            "Subspaces(..., bases=Principal()), or leave them out."
        )
    if public is None or not isinstance(clipping, Subspaces):
        return None
    assert clipping.bases is not None
    check_enough(model, public, clipping.ranks, clipping.bases)
    return BasisSchedule(model, loss, public, clipping)
