"""Methods built on a private step or a private sum."""
