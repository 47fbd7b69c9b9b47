"""Per-sample gradients: recorded by layer, measured by ghost norms, clipped and summed.

Read `recording` (one pass leaves a tape), `interception` and `rules` (how layers leave their factors),
`tape` (norms and weighted sums of a batch), `terms`, `factors` and `convolution` (the same for one
parameter), `precision` (the arithmetic whose rounding is bounded). Soundness: docs/guarantees/tape.md.
"""
