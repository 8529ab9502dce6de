"""`KVCacheManager` and what it is made of: requests, slots, steps, pins and statistics.

kv_cache_manager.py   the face; requests by call      settings.py        its settings, checked
request_table.py      who is known, and in which slot cache_blocks.py    blocks as calls return them
step_plan.py          a step, checked                 step_execution.py  a step, carried out
step_ledger.py        what a failed step undoes       admission.py       who may be let in
cache_control.py      pins, evictions, resets         statistics.py      statistics of all of it
"""

from kvcache.manager.kv_cache_manager import KVCacheManager

__all__ = ["KVCacheManager"]
