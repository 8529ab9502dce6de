"""KVCacheManager: which blocks a request gets, by single calls or a whole step at a time.

Below the coordinator, which calls it, and above a core, which keeps the books of the blocks. The
manager knows requests, slots, steps, pins and statistics. Refuses to schedule: who runs and who is
preempted is the engine's choice; it says who found no room.

    get_computed_blocks ─▶ allocate_slots ─▶ ... ─▶ free        one request, the caller's object
    step(StepRequest) ─▶ StepResult                             a whole step, the manager's objects

Both ways share one pool. A request belongs to the way by which it came: calls refuse to change
requests of steps, and steps those of calls. One owner, one thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from kvcache.admission import Admission, AdmissionLimits
from kvcache.cache_blocks import KVCacheBlocks
from kvcache.clock import Clock, SystemClock
from kvcache.commands import Command
from kvcache.core import CacheEvent, Core, EventSink, NullOffloadHooks, OffloadHooks
from kvcache.core_registry import CORES, CoreFactory, CoreSettings, make_core
from kvcache.errors import ConfigurationError, RequestError
from kvcache.events_buffer import EventBuffer
from kvcache.hashing import DEFAULT_HASH_SEED, get_hash_fn, get_request_block_hasher
from kvcache.labels import LabelSet
from kvcache.manager_statistics import ManagerStatistics
from kvcache.pins import Pin
from kvcache.prefix_keeper import PrefixKeeper
from kvcache.prefix_statistics import PrefixCacheStats
from kvcache.request import LoRARequest, Request, TokenIds
from kvcache.request_book import RequestBook
from kvcache.request_calls import RequestCalls
from kvcache.slots import SlotTable
from kvcache.specs import KVCacheConfig, require_count
from kvcache.step import StepRequest, StepResult
from kvcache.step_execution import StepExecutor
from kvcache.step_ledger import ClientSteps
from kvcache.step_plan import StepPlanner
