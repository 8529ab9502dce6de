"""Tests of the sequence-level API."""
