"""Picks the replica for a prompt; follows replicas by their cache events."""
