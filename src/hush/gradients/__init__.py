"""Per-sample gradients: recorded by layer, measured by ghost norms, clipped and summed.

Read `recording` (one pass leaves a tape), `rules` (how layers leave their factors), `tape` (norms and
weighted sums of a batch), `terms` (the same for one parameter), `precision` (the arithmetic whose
rounding is bounded). Soundness: docs/guarantees/tape.md.
"""
