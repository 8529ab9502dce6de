"""For whom a tier is asked: the request behind a look-up or a store.

Accompanies the keys in every call of an `OffloadingManager`. A tier of ours does not look at it;
tiers from outside may (priorities, tenants). Refuses to carry tokens: keys say what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcache.base.arguments import as_text, check_fields, check_kind
from kvcache.base.errors import InvalidInputError

NO_PARAMS: Mapping[str, str | int | float | bool] = MappingProxyType({})


@dataclass(frozen=True)
class ReqContext:
    """A request as tiers see it: its id, and what its caller wants tiers to know.

    Raises InvalidInputError for an empty id.
    """

    req_id: str
    params: Mapping[str, str | int | float | bool] = field(default_factory=lambda: NO_PARAMS)

    def __post_init__(self) -> None:
        check_fields(self, as_text, "req_id", error=InvalidInputError)
        check_kind("params", self.params, Mapping)
