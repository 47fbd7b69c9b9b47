"""Hyper-parameters chosen by private selection."""
