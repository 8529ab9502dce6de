"""Making the pages of different layers equally large.

Stands in the middle of grouping: layers that share a pool need pages of one size. Blocks of more
tokens come first, as they waste nothing; padding is the second choice. Refuses layers that allow
neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from kvcache.errors import ConfigurationError
from kvcache.planner.options import Warn, log_warning
from kvcache.specs import KVCacheSpec, ceil_div


def unify_page_sizes(
    specs: Mapping[str, KVCacheSpec], warn: Warn = log_warning
) -> dict[str, KVCacheSpec]:
    """Return `specs` with pages of equal bytes, those of the largest page (aligned for all).

    A smaller page becomes a block of an integer multiple of tokens if that fills the large page
    exactly; otherwise it is padded, and a warning says how much. Specs that agree come back as
    they are. Raises ConfigurationError that names the layers which can be neither.
    """
    if len({spec.page_size_bytes for spec in specs.values()}) <= 1:
        return dict(specs)
    alignment = lcm(*(spec.alignment_bytes for spec in specs.values()))
    largest = max(spec.page_size_bytes for spec in specs.values())
    target = ceil_div(largest, alignment) * alignment
    fitted = {name: _fit_page(spec, target) for name, spec in specs.items()}
    stuck = [name for name, spec in fitted.items() if spec is None]
    if stuck:
        sizes = ", ".join(f"{name} ({specs[name].page_size_bytes} bytes)" for name in stuck)
        raise ConfigurationError(
            f"pages of {target} bytes are needed to share pools, but these layers can have "
            f"neither larger blocks nor padding: {sizes}: choose block sizes whose pages agree"
        )
    unified = {name: spec for name, spec in fitted.items() if spec is not None}
    _warn_of_padding(specs, unified, warn)
    return unified


def _fit_page(spec: KVCacheSpec, target: int) -> KVCacheSpec | None:
    """Return `spec` with pages of `target` bytes, None if it can have none."""
    page = spec.page_size_bytes
    if page == target:
        return spec
    if target % page == 0:
        larger = spec.with_block_size(spec.block_size * (target // page))
        if larger is not None and larger.page_size_bytes == target:
            return larger
    return spec.with_page_size_padded(target)


def _warn_of_padding(
    specs: Mapping[str, KVCacheSpec], unified: Mapping[str, KVCacheSpec], warn: Warn
) -> None:
    """Warn once per size of padding that `unified` added."""
    padded: dict[tuple[int, int], list[str]] = {}
    for name, spec in unified.items():
        if spec.block_size == specs[name].block_size and spec != specs[name]:
            sizes = (specs[name].page_size_bytes, spec.page_size_bytes)
            padded.setdefault(sizes, []).append(name)
    for (before, after), names in padded.items():
        warn(
            f"pages of {len(names)} layers like {names[0]} are padded from {before} to {after} "
            f"bytes to share pools: {(after - before) / after:.1%} of their memory is wasted"
        )
