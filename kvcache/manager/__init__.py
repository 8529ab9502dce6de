"""`KVCacheManager` and its parts: requests, slots, steps, pins and statistics.

kv_cache_manager.py   the public class, per-request calls   settings.py        its checked settings
request_table.py      known requests and their slots        cache_blocks.py    results of calls
step_plan.py          checks a step                         step_execution.py  executes a step
step_ledger.py        undo records of unfinished steps      forks.py           forked requests
admission.py          watermark and tenants' limits         model_limits.py    the model's limits
cache_control.py      evictions, resets, drains, holds      pins.py            pinned prefixes
tiers.py              connection to the tiers below         loads.py           loads from them
statistics.py         statistics of the manager
"""

from kvcache.manager.kv_cache_manager import KVCacheManager

__all__ = ["KVCacheManager"]
