"""Performance beside peers or the non-private step, each a script of its own."""
