"""Blocks in files: format, store.py, the threads that use it, and the directory (tier.py)."""
