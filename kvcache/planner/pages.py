"""Makes the pages of different layers equally large.

Layers that share a pool need pages of one size. Larger blocks are preferred, as they waste nothing;
padding is the second choice. Refuses layers that allow neither.

A state is often far larger than a page of a few tokens, and cannot grow. So the other pages grow:

    before   attention |16 tokens|                       state |-------- a state --------|
    after    attention |16 |16 |16 |16 |16 |16 |16 |     state |-------- a state ------|pad|

A request holds many pages of tokens, but only a few states. So the state is padded up to whole
blocks of tokens, not every block of tokens up to the state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from math import inf, lcm

from kvcache.base.errors import ConfigurationError
from kvcache.planner.options import LayerSpecs, Warn, check_layer_specs, check_warn, log_warning
from kvcache.specs import KVCacheSpec, ceil_div

MAX_GROWTH = 4096
"""Most blocks that are merged into a larger one: at 16 tokens a block, 65536 tokens."""


def unify_page_sizes(specs: LayerSpecs, warn: Warn = log_warning) -> dict[str, KVCacheSpec]:
    """Return `specs` with pages of equal bytes, aligned for all of them.

    If the layer with the largest page can have larger blocks, its size is the size of all.
    Otherwise, as for a state, the size is a whole number of blocks of another layer, at most twice
    the largest page: the size that pads the least, in shares of a page summed over layers. Smaller
    pages get as many tokens as fit, in integer multiples of their block; the rest is padding, and a
    warning says how much. Specs that agree are returned unchanged. Raises ConfigurationError that
    names layers which allow neither.
    """
    check_layer_specs(specs)
    check_warn(warn)
    if len({spec.page_size_bytes for spec in specs.values()}) <= 1:
        return dict(specs)
    sizes = _PageSizes(specs)
    target = sizes.target()
    fitted = {spec: sizes.fit(spec, target) for spec in sizes.num_layers}
    stuck = [name for name, spec in specs.items() if fitted[spec] is None]
    if stuck:
        listed = ", ".join(f"{name} ({specs[name].page_size_bytes} bytes)" for name in stuck)
        raise ConfigurationError(
            f"pages of {target} bytes are needed to share pools, but these layers can have "
            f"neither larger blocks nor padding: {listed}: choose block sizes whose pages agree"
        )
    unified = {name: made for name, spec in specs.items() if (made := fitted[spec]) is not None}
    _warn_of_padding(specs, unified, warn)
    return unified


def align_state_blocks(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Return `specs` with states kept only where blocks of all the layers with tokens end.

    A prefix is a hit only if every group can start from it. A state at another place would take
    memory and never be read. So the block size of cached states is raised to a multiple of the
    others'. The page of a state does not depend on it.
    """
    tokens = lcm(
        *(
            spec.block_size
            for spec in specs.values()
            if spec.num_state_blocks is None and not spec.keeps_encoder_tokens
        )
    )
    return {name: _with_blocks_of_multiple(spec, tokens) for name, spec in specs.items()}


def _with_blocks_of_multiple(spec: KVCacheSpec, num_tokens: int) -> KVCacheSpec:
    if spec.num_state_blocks is None or not spec.can_prefix_cache:
        return spec
    raised = spec.with_block_size(ceil_div(spec.block_size, num_tokens) * num_tokens)
    return spec if raised is None else raised


# ---------------------------------------------------------------------------------------------
# One size for all
# ---------------------------------------------------------------------------------------------


class _PageSizes:
    """Possible page sizes of some layers; `num_layers`: how many layers have each spec."""

    def __init__(self, specs: Mapping[str, KVCacheSpec]) -> None:
        self.num_layers = num_layers = Counter(specs.values())
        self._alignment = lcm(*(spec.alignment_bytes for spec in num_layers))
        self._largest = max(spec.page_size_bytes for spec in num_layers)
        self._at_least = ceil_div(self._largest, self._alignment) * self._alignment
        self._growths: dict[KVCacheSpec, list[KVCacheSpec]] = {}
        for name, spec in specs.items():
            if spec not in self._growths:
                self._growths[spec] = _growths(name, spec, 2 * self._at_least)

    def target(self) -> int:
        """Return the bytes that every page shall have."""
        growable = [sizes for sizes in self._growths.values() if len(sizes) > 1]
        if any(sizes[0].page_size_bytes == self._largest for sizes in growable):
            return self._at_least
        candidates = {made.page_size_bytes for sizes in growable for made in sizes}
        aligned = (
            page for page in candidates if page >= self._at_least and not page % self._alignment
        )
        return min(aligned, key=lambda page: (self._waste(page), page), default=self._at_least)

    def fit(self, spec: KVCacheSpec, target: int) -> KVCacheSpec | None:
        """Return `spec` with pages of `target` bytes, None if it cannot have them."""
        sizes = self._growths[spec]
        grown = sizes[bisect_right(sizes, target, key=_page_size_bytes) - 1]
        return grown if grown.page_size_bytes == target else grown.with_page_size_padded(target)

    def _waste(self, page_size_bytes: int) -> float:
        """Return the padding of all layers, in pages, if pages have this size."""
        waste = 0.0
        for spec, num_layers in self.num_layers.items():
            fitted = self.fit(spec, page_size_bytes)
            if fitted is None:
                return inf
            waste += num_layers * (1 - fitted.real_page_size_bytes / page_size_bytes)
        return waste


def _page_size_bytes(spec: KVCacheSpec) -> int:
    return spec.page_size_bytes


def _growths(layer_name: str, spec: KVCacheSpec, at_most: int) -> list[KVCacheSpec]:
    """Return `spec` and its copies with larger blocks, by size, up to pages of `at_most`.

    A state has no copies: its page does not depend on its number of tokens. Raises
    ConfigurationError, naming the layer, if blocks would have to grow beyond `MAX_GROWTH`.
    """
    sizes = [spec]
    largest_ratio = at_most // spec.page_size_bytes
    for ratio in range(2, largest_ratio + 1):
        larger = spec.with_block_size(spec.block_size * ratio)
        if larger is None or larger.page_size_bytes > at_most:
            continue
        if larger.page_size_bytes <= spec.page_size_bytes:
            break
        if largest_ratio > 2 * MAX_GROWTH:
            raise ConfigurationError(
                f"a page of layer {layer_name} (kind {spec.kind}, {spec.block_size} tokens) takes "
                f"{spec.page_size_bytes} bytes, the largest page {at_most // 2}: the one would "
                f"have to grow more than {MAX_GROWTH} times to share pools with the other: raise "
                "its block size"
            )
        sizes.append(larger)
    return sizes


def _warn_of_padding(
    specs: Mapping[str, KVCacheSpec], unified: Mapping[str, KVCacheSpec], warn: Warn
) -> None:
    """Warn once per size of padding that `unified` added."""
    padded: dict[tuple[int, int], list[str]] = {}
    for name, spec in unified.items():
        before = specs[name].page_size_bytes * (
            spec.real_page_size_bytes // specs[name].real_page_size_bytes
        )
        if before != spec.page_size_bytes:
            padded.setdefault((before, spec.page_size_bytes), []).append(name)
    for (before, after), names in padded.items():
        warn(
            f"pages of {len(names)} layers like {names[0]} are padded from {before} to {after} "
            f"bytes to share pools: {(after - before) / after:.1%} of their memory is wasted"
        )
