"""Requests: their tokens, what sets their contents apart, and the digests of their blocks."""
