"""One private step run by several processes: handshake, streams, shares, noise and charge."""
