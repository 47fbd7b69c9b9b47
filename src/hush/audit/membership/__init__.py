"""Membership attacks: was this record in the training set? They bound nothing, and show what is easy."""
