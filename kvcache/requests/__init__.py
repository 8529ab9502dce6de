"""Requests: their tokens, what tells equal tokens apart, and the digests of their blocks."""
