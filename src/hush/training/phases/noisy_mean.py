"""Noisy mean of a step's clipped gradients: what it releases, once that is charged."""

from functools import partial

from torch import Tensor

from hush.gradients.models import check_model, check_optimizer
from hush.gradients.public_basis import PublicBasis
from hush.training.checks.released_weights import Reading
from hush.training.data import Batch
from hush.training.distributed.group import Processes, propagate_errors
from hush.training.distributed.noise_slices import NoiseSlices
from hush.training.phases.clipped_sum import ClippedSumStep
from hush.training.phases.private_gradient import Layout, early_noise, fingerprint, noisy_mean


class NoisyMeanStep(ClippedSumStep):
    """Private gradients of a step's batches; `PrivateStep` draws these and charges those."""

    _reading: Reading | None = None
    """Weights of the step at hand; None: they, the model and the optimizer were not yet looked at."""

    def private_gradient(self, batch: Batch) -> Tensor:
        """Noisy mean of the clipped per-sample gradients of a batch, to be charged before it is used.

        `privatize(clipped_sum(batch))`, with the noise drawn while gradients are computed where it pays
        and neither is overridden; an override must release no more.

        Args:
            batch: slots drawn under the plan.

        Returns:
            Flat vector in double precision, the trainable parameters one after another; of sharded
            ones, this rank's shards.
        """
        own = type(self).clipped_sum, type(self).privatize
        if own != (ClippedSumStep.clipped_sum, NoisyMeanStep.privatize):
            return self.privatize(self.clipped_sum(batch))
        layout, basis = self.layout(), self._basis()
        self._begin_streams()
        if self.sharded is not None:
            with propagate_errors(self.processes):
                return self.privatize(self._sharded_sum(batch, self.sharded))
        if self.processes is not None:
            with propagate_errors(self.processes):
                return self._noise_slices(layout, basis, self.processes).mean_of_shares(
                    partial(self._local_sum, batch, basis, layout), self.device
                )
        if (
            self._replay is None
            or type(self).clip_physical_batch is not ClippedSumStep.clip_physical_batch
        ):
            return self._noisy_sum(batch, layout, basis)
        # the GPU does not wait for what the host looks at, nor the host for the GPU before noise is on
        # its way; a sum that cannot be used is never released, and computed again
        before = self._mask_stream.get_state(), self._skipped
        self._verify_later = self._replay.fits(layout.parameters.values())
        try:
            update = self._noisy_sum(batch, layout, basis)
        finally:
            self._verify_later = False
        if self._replay.failed():
            self._mask_stream.set_state(before[0])
            self._skipped = before[1]
            update = self._noisy_sum(batch, layout, basis)
        return update

    def _noisy_sum(self, batch: Batch, layout: Layout, basis: PublicBasis | None) -> Tensor:
        """Noisy mean, of noise that is drawn while gradients are computed where that pays."""
        with early_noise(self.plan, layout, self.generator, self.device) as drawn:
            total, noise = self._sum(batch, basis, layout), drawn()
        self._check_model()
        if self._replay is not None:
            self._replay.confirm()
        return noisy_mean(total, self.plan, layout, basis, self.records, self.generator, noise)

    def _check_model(self) -> Reading:
        """Weights as read once a step, after a check that model and optimizer are fit for it.

        Before any work, or while a GPU replays it: a replay is of a model that was checked.
        """
        if self._reading is None:
            check_model(self._tree, sharded=self.sharded is not None)
            check_optimizer(self.optimizer, self._tree)
            self._reading = self._weights.read()
        return self._reading

    def privatize(self, total: Tensor) -> Tensor:
        """Noisy mean from a clipped sum; not to be used before it is charged.

        Args:
            total: of `clipped_sum`; it is overwritten.

        Returns:
            Flat vector in double precision, the trainable parameters one after another.
        """
        layout, basis = self.layout(), self._basis()
        if self.processes is None:
            return noisy_mean(total, self.plan, layout, basis, self.records, self.generator)
        if self._streams is None:
            self._begin_streams()
        if self.sharded is not None:
            assert self._streams is not None
            return noisy_mean(total, self.plan, layout, None, self.records, self._streams.noise)
        return self._noise_slices(layout, basis, self.processes).mean_of_sum(total)

    def _noise_slices(
        self, layout: Layout, basis: PublicBasis | None, processes: Processes
    ) -> NoiseSlices:
        assert self._streams is not None
        source = self._streams.noise
        return NoiseSlices(self.plan, layout, basis, self.records, source, processes)

    def release_name(self, update: Tensor) -> str:
        """Fingerprint of a private gradient, by which it is charged; the same on every rank."""
        return fingerprint([update]) if self.sharded is None else self.sharded.release_name(update)
