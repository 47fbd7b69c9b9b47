"""How commands print."""

import json
import math
from typing import Any


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; what is infinite becomes null, which every reader understands."""
    print(json.dumps(_finite(value)))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
