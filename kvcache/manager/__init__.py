"""`KVCacheManager` and what it is made of: requests, slots, steps, pins and statistics.

kv_cache_manager.py   the face; requests by call      parts.py            how it is put together
cache_blocks.py       blocks as calls return them     admission.py        who may be let in
step_plan.py          a step, checked                 step_execution.py   a step, carried out
step_ledger.py        what a failed step takes back   row_plan.py         running rows as arrays
slots.py              rows of running requests        request_book.py     who is known
cache_control.py      pins, eviction, reset, drain    core_registry.py    cores by name
"""

from kvcache.manager.kv_cache_manager import KVCacheManager

__all__ = ["KVCacheManager"]
