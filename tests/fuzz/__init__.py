"""Every decoder, fed what it was not made for.

    python -m tests.fuzz --minutes 5 [--seed N] [TARGET ...]

A decoder has to answer anything with a value or with one of its stated errors, and to stay usable.
"""
