"""What an attacker can do: privacy profile, trade-off curve, rates, and noise for a limit on them."""
