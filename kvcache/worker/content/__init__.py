"""Content checking: what every byte of a block must be, written and compared."""
