"""Feeds garbage to every decoder.

    python -m tests.fuzz --minutes 5 [--seed N] [TARGET ...]

A decoder must answer any input with a value or one of its documented errors, and stay usable.
"""
