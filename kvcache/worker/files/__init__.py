"""Blocks in files: format, store, directory, and the lanes that read and write."""
