"""Copies of blocks: engines by device, stores and loads as tasks, and the threads that copy."""
