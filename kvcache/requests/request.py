"""A request: its tokens, what tells equal tokens apart, and its progress.

An engine's tokens enter here, are checked once, and are kept in one growable int32 array, which
look-up, allocation and hashing read. A request does not hash (it has a block hasher, called only
when digests are needed), holds no blocks and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.base.arguments import MAX_INT, as_bool, as_int, as_text, check_kind, check_methods
from kvcache.base.errors import RequestError, shown
from kvcache.requests.digests import join_digests
from kvcache.requests.hash_algorithms import BlockHash
from kvcache.requests.hints import CacheHint, checked_hints
from kvcache.requests.request_content import (
    DEFAULT_NAMESPACE,
    LoRARequest,
    MultiModalPosition,
    Namespace,
    lora_label,
    sorted_items,
)
from kvcache.requests.tokens import MAX_TOKEN_ID, TokenIds, are_token_ids, as_token_ids

__all__ = [
    "MAX_TOKEN_ID",
    "BlockHash",
    "BlockHasher",
    "LoRARequest",
    "MultiModalPosition",
    "Namespace",
    "Request",
    "RequestView",
    "TokenIds",
    "as_token_ids",
]

_FEW_TOKENS = 16
_SPARE_TOKENS = 64
_TOKEN_BYTES = 4

_NO_ITEMS: tuple[()] = ()
"""The default for multimodal items: recognised by identity."""

_PLACEHOLDER = "\0"
"""The first character of ids of placeholder requests. No other request has it."""


class BlockHasher(Protocol):
    """Computes a request's digests, one per full block of `block_size` tokens."""

    @property
    def block_size(self) -> int:
        """Tokens per digest."""

    @property
    def none_hash(self) -> BlockHash:
        """Parent of every first block."""

    def __call__(self, request: Request, known: Sequence[BlockHash]) -> list[BlockHash]:
        """Digests of the full blocks after the `known` ones. Changes nothing."""

    def digests(
        self, request: Request, first: int, last: int, parent: BlockHash
    ) -> list[BlockHash]:
        """Digests of the full blocks `[first, last)`; `parent` is the one before. No mutation."""


def _read_at_once(made: type[Request]) -> type[Request]:
    """Let properties that only read an attribute do so without a Python call, because each of the
    manager's calls reads several of them."""
    for name, attribute in (
        ("num_tokens", "_num_tokens"),
        ("num_computed_tokens", "_num_computed_tokens"),
        ("num_preemptions", "_num_preemptions"),
        ("hints", "_hints"),
        ("token_buffer", "_tokens"),
        ("block_hasher", "_block_hasher"),
        ("known_block_hashes", "_block_hashes"),
    ):
        known: property = vars(made)[name]
        setattr(made, name, property(attrgetter(attribute), known.fset, doc=known.__doc__))
    return made


@_read_at_once
class Request:
    """One sequence: prompt tokens, output tokens so far, and its progress.

    Args:
        request_id: names the request; not empty.
        prompt_token_ids: at least one id from 0 to `MAX_TOKEN_ID`; copied, unless they are an int32
            array over the whole of a `bytes` object.
        lora: adapter the request runs with.
        mm_positions: placeholders of multimodal items inside the prompt, as `MultiModalPosition` or
            `(offset, length)`; kept in order of position.
        mm_hashes: content hash of each item, one per position.
        cache_salt: separates the request's blocks from equal tokens with another salt.
        skip_reading_prefix_cache: the request looks nothing up, but its blocks may be cached.
        block_hasher: computes `block_hashes`; may also be attached later, or never.
        tenant: separates the request's blocks in look-ups; not part of a digest.
        model_epoch: generation of the model's weights; not part of a digest.

    Raises:
        RequestError: an argument is invalid. The message names the request and the value.
    """

    __slots__ = (
        "_block_hasher",
        "_block_hashes",
        "_hints",
        "_num_computed_tokens",
        "_num_preemptions",
        "_num_tokens",
        "_packed_hashes",
        "_prompt_bytes",
        "_tokens",
        "cache_salt",
        "is_plain",
        "lora",
        "mm_hashes",
        "mm_positions",
        "namespace",
        "num_prompt_tokens",
        "request_id",
        "skip_reading_prefix_cache",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: TokenIds,
        *,
        lora: LoRARequest | None = None,
        mm_positions: Sequence[MultiModalPosition | tuple[int, int]] = (),
        mm_hashes: Sequence[str] = (),
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool = False,
        block_hasher: BlockHasher | None = None,
        tenant: str | None = None,
        model_epoch: int = 0,
    ) -> None:
        request_id = as_text("request id", request_id, RequestError)
        check_request_id(request_id)
        if lora is not None:
            check_kind(f"request {request_id}: lora", lora, LoRARequest, RequestError)
        if type(model_epoch) is not int or not 0 <= model_epoch <= MAX_INT:
            what = f"request {request_id}: model epoch"
            model_epoch = as_int(what, model_epoch, error=RequestError)
        if skip_reading_prefix_cache is not False:
            what = f"request {request_id}: skip_reading_prefix_cache"
            skip_reading_prefix_cache = as_bool(what, skip_reading_prefix_cache, RequestError)
        if block_hasher is not None:
            _check_hasher(request_id, block_hasher)
        tokens = as_token_ids(prompt_token_ids, f"request {request_id}: prompt token id")
        if tokens.size == 0:
            raise RequestError(
                f"request {request_id}: the prompt is empty: pass at least one token"
            )
        if cache_salt is not None:
            cache_salt = as_text(f"request {request_id}: cache salt", cache_salt, RequestError)
        if tenant is not None:
            tenant = as_text(f"request {request_id}: tenant", tenant, RequestError)
        positions: tuple[MultiModalPosition, ...] = ()
        hashes: tuple[str, ...] = ()
        if mm_positions is not _NO_ITEMS or mm_hashes is not _NO_ITEMS:
            items = sorted_items(request_id, mm_positions, mm_hashes, tokens.size)
            positions = tuple([position for position, _ in items])
            hashes = tuple([mm_hash for _, mm_hash in items])

        self.request_id: Final = request_id
        self.lora: Final = lora
        self.mm_positions: Final = positions
        self.mm_hashes: Final = hashes
        self.cache_salt: Final = cache_salt
        self.skip_reading_prefix_cache: Final = skip_reading_prefix_cache
        self.is_plain: Final = lora is None and cache_salt is None and not positions
        """Whether no block of it has extra keys."""
        is_default = lora is None and cache_salt is None and tenant is None and not model_epoch
        self.namespace: Final = (
            DEFAULT_NAMESPACE
            if is_default
            else Namespace(model_epoch, lora_label(lora), cache_salt, tenant)
        )
        self.num_prompt_tokens: Final[int] = tokens.size
        self._num_preemptions = 0
        # Invariants: num_prompt_tokens <= _num_tokens <= len(_tokens),
        # 0 <= _num_computed_tokens <= _num_tokens, and every digest kept is of a full block.
        # A copy without other references is kept as it is. Otherwise tokens are kept as bytes:
        # prompts are compared as bytes, and need no second copy until tokens are appended.
        is_own = tokens is not prompt_token_ids and tokens.base is None
        self._prompt_bytes: bytes | None = None if is_own else _bytes_of(tokens)
        self._tokens: NDArray[np.int32] = (
            tokens if self._prompt_bytes is None else np.frombuffer(self._prompt_bytes, np.int32)
        )
        self._num_tokens: int = self.num_prompt_tokens
        self._num_computed_tokens = 0
        self._hints: tuple[CacheHint, ...] = ()
        self._block_hasher = block_hasher
        self._block_hashes: list[BlockHash] = []
        # The digests that were computed together at first: joined while they are available.
        self._packed_hashes = b""

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """Return the state for a copy or a pickle, which shares no mutable data."""
        state = {name: getattr(self, name) for name in Request.__slots__}
        if self._prompt_bytes is None:  # the array may be longer than the tokens
            state["_tokens"] = self._tokens[: self._num_tokens].copy()
        state["_block_hashes"] = list(self._block_hashes)
        return None, state

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self._num_tokens} tokens, "
            f"{self.num_prompt_tokens} of them prompt, {self._num_computed_tokens} computed)"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return self._num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens `[0, n)` whose keys and values are in the cache, or will be after this step."""
        return self._num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        if type(num_tokens) is not int:
            num_tokens = self._as_count(num_tokens)
        if not 0 <= num_tokens <= self._num_tokens:
            raise RequestError(
                f"request {self.request_id}: {shown(num_tokens)} computed tokens, but it has "
                f"{self._num_tokens} tokens: pass a number from 0 to {self._num_tokens}"
            )
        self._num_computed_tokens = num_tokens

    @property
    def num_preemptions(self) -> int:
        """How often it was preempted."""
        return self._num_preemptions

    @num_preemptions.setter
    def num_preemptions(self, num_preemptions: int) -> None:
        what = f"request {self.request_id}: num_preemptions"
        self._num_preemptions = as_int(what, num_preemptions, error=RequestError)

    @property
    def hints(self) -> tuple[CacheHint, ...]:
        """Hints for its blocks, followed when it is freed. Assign others at any time before."""
        return self._hints

    @hints.setter
    def hints(self, hints: Sequence[CacheHint]) -> None:
        self._hints = checked_hints(f"request {self.request_id}", hints)

    @property
    def all_token_ids(self) -> NDArray[np.int32]:
        """All tokens, as a read-only view of `num_tokens` int32: valid until the next change."""
        view = self._tokens[: self._num_tokens]
        view.flags.writeable = False
        return view

    @property
    def token_buffer(self) -> NDArray[np.int32]:
        """An array that begins with all tokens; the rest is undefined. Do not write to it."""
        return self._tokens

    def token_bytes(self, start: int, end: int) -> bytes:
        """Return tokens `[start, end)`, as far as they exist, as int32 bytes."""
        if self._prompt_bytes is not None:  # slicing all of a bytes object copies nothing
            return self._prompt_bytes[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
        tokens: bytes = self._tokens[start : min(end, self._num_tokens)].tobytes()
        return tokens

    def append_output_token_ids(self, ids: TokenIds) -> None:
        """Append output tokens, or none if one of them is not a token id.

        Raises:
            RequestError: names the first value that is not a token id, and its index in `ids`.
        """
        new: Sequence[int] | NDArray[np.int32]
        # For the one token of a decode step, numpy's fixed cost would dominate.
        if type(ids) is list and len(ids) <= _FEW_TOKENS and are_token_ids(ids):
            new = ids
        else:
            new = as_token_ids(ids, f"request {self.request_id}: output token id")
        self.append_checked_token_ids(new)

    def append_checked_token_ids(self, ids: Sequence[int] | NDArray[np.int32]) -> None:
        """Append output tokens without checking that they are token ids."""
        end = self._num_tokens + len(ids)
        if end == self._num_tokens:
            return
        if end > len(self._tokens):
            grown = np.empty(end + end // 2 + _SPARE_TOKENS, np.int32)
            grown[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens, self._prompt_bytes = grown, None
        self._tokens[self._num_tokens : end] = ids
        self._num_tokens = end

    def truncate_tokens(self, num_tokens: int) -> None:
        """Remove appended tokens, so that `num_tokens` remain.

        Drops the digests of blocks that are no longer full, and lowers `num_computed_tokens` to at
        most `num_tokens`.

        Raises:
            RequestError: that would shorten the prompt, or there are fewer tokens.
        """
        num_tokens = self._as_count(num_tokens)
        if not self.num_prompt_tokens <= num_tokens <= self._num_tokens:
            raise RequestError(
                f"request {self.request_id}: cannot truncate to {shown(num_tokens)} tokens: it "
                f"has {self._num_tokens}, {self.num_prompt_tokens} of them prompt: pass a number "
                f"from {self.num_prompt_tokens} to {self._num_tokens}"
            )
        self._num_tokens = num_tokens
        self._num_computed_tokens = min(self._num_computed_tokens, num_tokens)
        if self._block_hasher is not None:
            num_full = num_tokens // self._block_hasher.block_size
            if num_full < len(self._block_hashes):
                del self._block_hashes[num_full:]
                self._packed_hashes = b""

    def _as_count(self, num_tokens: int) -> int:
        what = f"request {self.request_id}: number of tokens"
        return as_int(what, num_tokens, -MAX_INT, error=RequestError)

    @property
    def block_hasher(self) -> BlockHasher | None:
        """The hasher that computes `block_hashes`, if any."""
        return self._block_hasher

    def attach_block_hasher(self, block_hasher: BlockHasher) -> None:
        """Attach a hasher that computes `block_hashes`; attaching an equal one does nothing.

        Raises:
            RequestError: another one is attached already.
        """
        _check_hasher(self.request_id, block_hasher)
        if self._block_hasher is not None and self._block_hasher != block_hasher:
            raise RequestError(
                f"request {self.request_id} has the block hasher {self._block_hasher}, not "
                f"{block_hasher}: use one algorithm, seed and block size for a request"
            )
        self._block_hasher = block_hasher

    @property
    def known_block_hashes(self) -> Sequence[BlockHash]:
        """The digests computed so far, of the first full blocks; computes none.

        The result belongs to the request and is valid until the next change.
        """
        return self._block_hashes

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Digest of each full block, in order; missing ones are computed now and kept.

        The result belongs to the request: do not change it. It is valid until the next change.

        Raises:
            RequestError: no block hasher is attached.
        """
        hasher = self._block_hasher
        if hasher is None:
            raise self._without_hasher()
        hashes = self._block_hashes
        if (len(hashes) + 1) * hasher.block_size <= self._num_tokens:
            new = hasher(self, hashes)
            if not hashes:
                self._packed_hashes = join_digests(new)
            hashes.extend(new)
        return hashes

    def packed_block_hashes(self, first: int, end: int) -> bytes:
        """Return the known digests of full blocks `[first, end)`, joined."""
        size = len(self._block_hashes[0])
        if end * size <= len(self._packed_hashes):
            return self._packed_hashes[first * size : end * size]
        return join_digests(self._block_hashes[first:end])

    def _without_hasher(self) -> RequestError:
        return RequestError(
            f"request {self.request_id} has no block hasher: create it with "
            "block_hasher=get_request_block_hasher(block_size, hash_fn)"
        )


class RequestView(Request):
    """A read-only snapshot of another caller's request.

    Its tokens are a view, valid until that request changes.

    Raises:
        RequestError: on every call that would change the request.
    """

    __slots__ = ()

    def __init__(self, request: Request) -> None:
        """Take a snapshot of `request`."""
        for name in Request.__slots__:
            object.__setattr__(self, name, getattr(request, name))
        object.__setattr__(self, "_block_hashes", list(request.known_block_hashes))

    def __repr__(self) -> str:
        return super().__repr__().replace("Request(", "RequestView(", 1)

    @property
    def num_computed_tokens(self) -> int:
        return self._num_computed_tokens

    @num_computed_tokens.setter
    def num_computed_tokens(self, num_tokens: int) -> None:
        self._refuse("set num_computed_tokens")

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    @num_preemptions.setter
    def num_preemptions(self, num_preemptions: int) -> None:
        self._refuse("set num_preemptions")

    @property
    def hints(self) -> tuple[CacheHint, ...]:
        return self._hints

    @hints.setter
    def hints(self, hints: Sequence[CacheHint]) -> None:
        self._refuse("set hints")

    def append_output_token_ids(self, ids: TokenIds) -> None:
        self._refuse("append tokens")

    def append_checked_token_ids(self, ids: Sequence[int] | NDArray[np.int32]) -> None:
        self._refuse("append tokens")

    def truncate_tokens(self, num_tokens: int) -> None:
        self._refuse("truncate it")

    def _refuse(self, what: str) -> NoReturn:
        raise RequestError(
            f"request {self.request_id} belongs to the manager: cannot {what} in a view of it: "
            "name the request in a step"
        )


def copy_request(
    request: Request, request_id: str | None = None, *, model_epoch: int | None = None
) -> Request:
    """Return an uncomputed request with the same tokens, content and hints, but another id or
    model epoch."""
    tokens, num_prompt = request.all_token_ids, request.num_prompt_tokens
    namespace = request.namespace
    copy = Request(
        request_id or request.request_id,
        tokens[:num_prompt],
        lora=request.lora,
        mm_positions=request.mm_positions,
        mm_hashes=request.mm_hashes,
        cache_salt=request.cache_salt,
        skip_reading_prefix_cache=request.skip_reading_prefix_cache,
        block_hasher=request.block_hasher,
        tenant=namespace.tenant,
        model_epoch=namespace.model_epoch if model_epoch is None else model_epoch,
    )
    copy.append_checked_token_ids(tokens[num_prompt:])
    copy._hints = request.hints
    return copy


def placeholder_of(request: Request, load_id: int) -> Request:
    """Return a copy of the request, under an id that no other request has, for a load's blocks."""
    copy = copy_request(request)
    copy.request_id = f"{_PLACEHOLDER}load {load_id}"  # type: ignore[misc]  # no one has seen it yet
    return copy


def check_request_id(request_id: str) -> None:
    """Raise RequestError for an id that a placeholder request may have."""
    if request_id[:1] == _PLACEHOLDER:
        raise RequestError(
            f"request id {shown(request_id)} begins with a NUL character, which marks ids of the "
            "manager: use another id"
        )


def check_request(request: object) -> None:
    """Raise RequestError unless the caller may change `request`: it is not a view."""
    if type(request) is Request:
        return
    check_kind("request", request, Request, RequestError)
    if isinstance(request, RequestView):
        raise RequestError(
            f"request {request.request_id} was admitted by a step: change it by steps, or use "
            "another request id"
        )


def _check_hasher(request_id: str, block_hasher: BlockHasher) -> None:
    """Raise RequestError unless the request has a block hasher."""
    size = getattr(block_hasher, "block_size", None)
    if type(size) is int and size > 0 and callable(block_hasher):
        return
    what = f"request {request_id}: block hasher"
    check_methods(what, block_hasher, ("__call__", "digests"), RequestError)
    as_int(f"{what}: block size", size, 1, error=RequestError)


def _bytes_of(tokens: NDArray[np.int32]) -> bytes:
    """Return the bytes of contiguous tokens: the immutable bytes object below them, as in a
    message, or a copy."""
    viewed: object = tokens.base
    if isinstance(viewed, bytes) and len(viewed) == tokens.nbytes:
        return viewed
    return tokens.tobytes()
