"""The attention kinds: one file per kind with its compiled rules over plain arrays.

A kind says which prefix a request can reuse (`longest`, `first_read`), and which blocks no later
token reads (`num_skipped`, `next_skip`). `registry.py` chooses the kind by a group's rule
(`rule.py`).
"""
