"""A cluster whose coordinator runs in a process of its engine."""
