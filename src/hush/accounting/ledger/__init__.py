"""The ledger: append-only record of all charges."""
