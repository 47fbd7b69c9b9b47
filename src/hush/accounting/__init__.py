"""Profile, amplification, composition, (epsilon, delta); the ledger that keeps the count."""
