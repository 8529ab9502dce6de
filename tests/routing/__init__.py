"""Routers of our own: scores, followers, the actor."""
