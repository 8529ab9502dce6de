"""The small state of a cluster in Ray's own key-value store, for coordinators that may move.

Survives actors, drivers and the loss of any node but the head's. That store is not public API of
Ray: nothing outside this file touches it.
"""
