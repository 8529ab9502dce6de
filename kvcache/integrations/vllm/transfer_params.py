"""What a request says in `kv_transfer_params`: its hints, and whether it is a prefetch.

Values that make no sense are ignored, with one warning: the request is served as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcache.base.arguments import as_bool
from kvcache.base.errors import RequestError
from kvcache.base.logs import get_logger
from kvcache.requests.hints import CacheHint, hints_from_plain

logger = get_logger(__name__)


class TransferParams:
    """Reads the parameters of an engine's requests."""

    def __init__(self) -> None:
        self._has_warned = False

    def hints_of(self, request: Any) -> tuple[CacheHint, ...]:
        hints = self._value(request, "hints")
        if hints is None:
            return ()
        try:
            return hints_from_plain(f"request {request.request_id}", hints)
        except RequestError as error:
            self._warn(error)
            return ()

    def is_prefetch(self, request: Any) -> bool:
        """Say whether a request only loads what is held of its prompt."""
        value = self._value(request, "prefetch")
        if value is None:
            return False
        try:
            return as_bool(f"request {request.request_id}: prefetch", value, RequestError)
        except RequestError as error:
            self._warn(error)
            return False

    def _value(self, request: Any, name: str) -> object:
        params = getattr(request, "kv_transfer_params", None)
        return params.get(name) if isinstance(params, Mapping) else None

    def _warn(self, error: RequestError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("ignored in kv_transfer_params, also of later requests: %s", error)
