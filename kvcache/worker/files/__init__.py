"""Blocks in files: their format, the store, the lanes that read and write, and the directory."""
