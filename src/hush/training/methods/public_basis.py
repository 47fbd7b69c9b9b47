"""Public bases that a run's gradients are clipped in, recomputed from public records as it goes."""

from typing import Any

import torch
from torch import Tensor, nn

from hush.clipping import Subspaces
from hush.core.errors import DataError
from hush.core.parts import Clipping
from hush.core.randomness import Randomness, seed_from
from hush.gradients.public_basis import PublicBasis
from hush.gradients.tree import Loss
from hush.training.data import Data
from hush.training.methods.principal import check_enough, principal_basis


class BasisSchedule:
    """Public basis of each step; the same one for `every` steps.

    All that it depends on is public: the public records, released weights, and a seed of its own.
    """

    def __init__(self, model: nn.Module, loss: Loss, public: Data, clipping: Subspaces) -> None:
        assert clipping.bases is not None
        self.public = public
        self._model = model
        self._loss = loss
        self._ranks = clipping.ranks
        self._principal = clipping.bases
        self.current: PublicBasis | None = None
        self._inputs: dict[str, Any] = {}

    def at(self, step: int, generator: Randomness) -> PublicBasis:
        """Public basis of a step, counted from 0; drawn from a seed of the generator when it is new."""
        if self.current is None or (
            step % self._principal.every == 0 and step != self._inputs.get("step")
        ):
            weights = {name: value.detach().clone() for name, value in self._parameters().items()}
            seed = seed_from(generator)
            self._inputs = {"step": step, "seed": seed, "weights": weights}
            self.current = self._compute(seed)
        return self.current

    def state_dict(self) -> dict[str, Any]:
        """Step, seed and weights that the current basis was computed from."""
        return self._inputs

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Recompute the basis of a state, whatever the weights are now."""
        self._inputs, self.current = state, None
        if not state:
            return
        current = {name: value.detach().clone() for name, value in self._parameters().items()}
        try:
            self._set(state["weights"])
            self.current = self._compute(state["seed"])
        finally:
            self._set(current)

    def _compute(self, seed: int) -> PublicBasis:
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
    """Schedule of the public bases that a clipping asks for; None if it asks for none."""
    needed = isinstance(clipping, Subspaces) and clipping.bases is not None
    if needed and public is None:
        raise DataError(
            "the clipping takes its subspaces from public gradients, and public=None: bases worked out "
            "from the private records would give them away. Pass public=(inputs, targets), records that "
            "need no protection and are not in the private set (hush train: --public-records N)."
        )
    if not needed and public is not None:
        raise DataError(
            "public records were passed and the clipping has no use for them. Clip with "
            "Subspaces(..., bases=Principal()), or leave them out."
        )
    if public is None or not isinstance(clipping, Subspaces):
        return None
    assert clipping.bases is not None
    check_enough(model, public, clipping.ranks, clipping.bases)
    return BasisSchedule(model, loss, public, clipping)
