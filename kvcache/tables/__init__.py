"""Block tables for engines that keep the tables of each KV cache group themselves.

They use a `BlockPool` of their own; `KVCacheManager` does not use them.
"""
