"""Attacks from outside: what clients, routers, other processes and people may do to a cluster.

`python -m tests.attack` plays them longer, by hand.
"""
