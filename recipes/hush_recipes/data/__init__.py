"""Readers of published data sets, and features of images."""
