"""The kinds of attention: for each, one file with its rules, compiled, over plain arrays.

A kind says which prefix a request can start from (`longest`, `first_read`) and which blocks nobody
reads any more (`num_skipped`, `next_skip`). `registry.py` chooses by a group's rule (`rule.py`).
"""
