"""Per-instance RDP and Fisher information of noise on a bounded support (sensitive)."""
