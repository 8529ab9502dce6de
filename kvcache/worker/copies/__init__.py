"""Copies of blocks: engines by device, stores and loads as tasks, and the copying threads."""
