"""What a Trainer's checkpoint says of the private step: a name, under which its state is kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hush.core.errors import CheckpointError
from hush.integrations.extras import require

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = require("transformers", "transformers").TrainerCallback

_NAME = "private_step.json"
"""File of a checkpoint that names the state of the private step."""


class SaveStep(TrainerCallback):
    """Saves the private step with each checkpoint."""

    def __init__(self, save: Callable[[Path], None]) -> None:
        self._save = save

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._save(Path(args.output_dir, f"checkpoint-{state.global_step}"))


def write_name(folder: Path, name: dict[str, Any]) -> None:
    """Name a step's state in a checkpoint.

    Args:
        folder: of the checkpoint.
        name: of `save_step`.
    """
    (folder / _NAME).write_text(json.dumps(name) + "\n")


def read_name(folder: Path) -> dict[str, Any]:
    """Name of the step's state in a checkpoint; raises if it is of no private run.

    Args:
        folder: of the checkpoint.
    """
    try:
        name: dict[str, Any] = json.loads((folder / _NAME).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is of no private run, or was not finished ({error}): weights that were trained "
            "on these records without noise cannot be made private by going on. Resume from a "
            f"checkpoint with a {_NAME}, or begin with public weights."
        ) from None
    return name
