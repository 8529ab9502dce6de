"""Attacks from outside, by clients, routers, other processes and users of a cluster.

`python -m tests.attack` plays them longer, by hand.
"""
