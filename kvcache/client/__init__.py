"""The client of a coordinator: what it has asked for, and what it still waits for."""
