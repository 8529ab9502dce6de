"""A cluster whose coordinator lives in a process of its engine."""
