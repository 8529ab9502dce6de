"""Content checking: writes and compares every byte of a block."""
