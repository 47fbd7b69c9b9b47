"""Attacks on what the library runs: what they find never exceeds what is charged."""
