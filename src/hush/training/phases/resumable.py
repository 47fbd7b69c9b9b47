"""Private step whose state can be saved, and from which a run resumes."""

from typing import Any

from hush.core.errors import Unsupported
from hush.training.checkpoint import load_state, state_of
from hush.training.distributed.group import propagate_errors
from hush.training.phases.state import StepState


class ResumableStep(StepState):
    """State of a step, and its checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Checkpoint: all that a step needs to go on exactly as it would have (secret)."""
        self._check_nothing_pending()
        self._check_not_sharded("state_dict()")
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, on the ledger that was charged for it.

        Args:
            state: of `state_dict`, of the same plan, data, optimizer, views and kind of randomness. Of
                several ranks, that of rank 0 is loaded on all; the others may pass an empty one.
        """
        with propagate_errors(self.processes):
            self._check_nothing_pending()
            self._check_not_sharded("load_state_dict()")
            if self.processes is not None:
                state = self.processes.broadcast_object("the checkpoint", lambda: state)
            load_state(self, state)
            self.adopt_weights()

    def _check_not_sharded(self, what: str) -> None:
        if self.sharded is not None:
            raise Unsupported(
                f"{what} of a step whose parameters are sharded: a rank has its shard alone, and a "
                "checkpoint is of the whole model. Call save and load of "
                "hush.training.distributed.sharded_checkpoint on every rank."
            )
