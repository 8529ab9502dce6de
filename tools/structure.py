"""How large the code is, how its modules hang together, and how deep a call goes.

    python -m tools.structure [--json FILE]

Sizes and imports are read from the sources. Depth is counted while calls run: the Python frames of
`kvcache/` and `actors/` that a call enters (a generator counts each time it goes on), and the files
they stand in. Frames of other packages, and methods that dataclasses generate, are left out. Every
call is repeated first, so that nothing is compiled or imported while it is counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import numpy as np

from actors.local import LocalCluster
from kvcache.base.arrays import Int32Array
from kvcache.base.clock import VirtualClock
from kvcache.config import ClusterConfig, parse_config
from kvcache.manager import KVCacheManager
from kvcache.protocol.step import NewRequest, RunningRequests, StepRequest, StepResult
from kvcache.requests.hashing import get_hash_fn, get_request_block_hasher
from kvcache.requests.request import Request
from kvcache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvcache", "actors")
DECISION_PATH = ("manager", "core")
"""Parts of `kvcache/` that decide which request gets which block."""
SMALL_LINES = 60
LARGE_METHODS = 25
WIDE_PARAMETERS = 6
"""Beyond these, a class has many public methods and a constructor many parameters."""

BLOCK_SIZE = 16
NUM_BLOCKS = 2_000
CACHED_TOKENS = 256
NEW_TOKENS = 64
NUM_ROWS = 16
NUM_REPETITIONS = 3
NUM_STEPS = NUM_REPETITIONS * BLOCK_SIZE + 1
"""Of rows that begin with full blocks: in the last of them, each needs a block again."""

HASHER = get_request_block_hasher(BLOCK_SIZE, get_hash_fn("sha256"))
T = TypeVar("T")


@dataclass(frozen=True)
class Depth:
    """The source files and Python frames that a call enters."""

    files: int
    frames: int

    def __str__(self) -> str:
        return f"{self.files} / {self.frames}"


@dataclass(frozen=True)
class Structure:
    """The measured figures, in the order of the table."""

    step_files: int
    changing_step_files: int
    get_computed_blocks: Depth
    allocate_slots: Depth
    free: Depth
    step: Depth
    one_importer: int
    small_files: int
    large_classes: int
    wide_constructors: int
    loose_modules: int
    import_ranks: int
    product_lines: int
    test_lines: int
    decision_path_lines: int


LABELS: Mapping[str, str] = {
    "step_files": "files that one step passes, client to workers and back (tiers off)",
    "changing_step_files": "the same, when it seals and takes blocks",
    "get_computed_blocks": f"files / frames of get_computed_blocks ({CACHED_TOKENS} tokens, a hit)",
    "allocate_slots": f"files / frames of allocate_slots (that hit, {NEW_TOKENS} tokens more)",
    "free": "files / frames of free",
    "step": f"files / frames of a step of {NUM_ROWS} decodes that seals and takes blocks",
    "one_importer": "modules with exactly one importer",
    "small_files": f"files under {SMALL_LINES} lines",
    "large_classes": f"classes with more than {LARGE_METHODS} public methods, with inherited",
    "wide_constructors": f"constructors with more than {WIDE_PARAMETERS} parameters",
    "loose_modules": "loose modules in kvcache/",
    "import_ranks": "ranks of the import order",
    "product_lines": "lines of kvcache/ and actors/",
    "test_lines": "lines of tests/",
    "decision_path_lines": "lines of the decision path (" + ", ".join(DECISION_PATH) + ")",
}


def measure(root: Path = ROOT) -> Structure:
    """Measure the tree at `root`, and this process's code."""
    step_files, changing_step_files = files_of_cluster_steps()
    look_up, allocate, free = depths_of_calls()
    return Structure(
        step_files,
        changing_step_files,
        look_up,
        allocate,
        free,
        depth_of_step(),
        len(modules_with_one_importer(root)),
        sum(num_lines(path) < SMALL_LINES for path in product_sources(root)),
        len(large_classes(root)),
        len(wide_constructors(root)),
        len(list((root / "kvcache").glob("*.py"))),
        num_import_ranks(root),
        sum(map(num_lines, product_sources(root))),
        sum(map(num_lines, (root / "tests").rglob("*.py"))),
        sum(num_lines(path) for path in decision_path(root)),
    )


# --- the sources


def product_sources(root: Path) -> list[Path]:
    """Return the sources of the packages that are installed."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def decision_path(root: Path) -> Iterator[Path]:
    """Yield the sources of the decision path: a part may be a package or a module."""
    for part in DECISION_PATH:
        yield from (root / "kvcache" / part).rglob("*.py")
        yield from (root / "kvcache").glob(f"{part}.py")


def modules_with_one_importer(root: Path) -> list[str]:
    """Return the modules and packages that exactly one other source of the product imports.

    A name that a package passes on counts as an import of the package.
    """
    modules = {module_name(path, root): path for path in product_sources(root)}
    importers: dict[str, set[Path]] = {name: set() for name in modules}
    for path in modules.values():
        for name in imported_names(path):
            module = name if name in modules else name.rpartition(".")[0]
            if module in modules:
                importers[module].add(path)
    return [name for name, paths in importers.items() if len(paths) == 1]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted name of all that a source imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def large_classes(root: Path) -> list[str]:
    """Return the classes with many public methods. Properties count, and so do methods that a class
    inherits from another class of the product."""
    by_name = {found.name: found for found in classes(root)}
    return [
        name
        for name, found in by_name.items()
        if len(public_methods(found, by_name)) > LARGE_METHODS
    ]


def public_methods(found: ast.ClassDef, by_name: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return the names of a class's public methods, and of those that it inherits."""
    names = {method.name for method in methods_of(found) if not method.name.startswith("_")}
    for base in found.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(named, ast.Name) and named.id in by_name and named.id != found.name:
            names |= public_methods(by_name[named.id], by_name)
    return names


def wide_constructors(root: Path) -> list[str]:
    """Return the classes whose own `__init__` has many parameters. `self` does not count."""
    wide = []
    for found in classes(root):
        for method in methods_of(found):
            arguments = method.args.posonlyargs + method.args.args + method.args.kwonlyargs
            if method.name == "__init__" and len(arguments) - 1 > WIDE_PARAMETERS:
                wide.append(found.name)
    return wide


def classes(root: Path) -> Iterator[ast.ClassDef]:
    """Yield the classes of the product, also those inside functions."""
    for path in product_sources(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node


def methods_of(found: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [
        node for node in found.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]


def num_import_ranks(root: Path) -> int:
    """Count the ranks of `ORDER` in the architecture test."""
    path = root / "tests" / "test_architecture.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ORDER" and node.value:
            return len(ast.literal_eval(node.value))
    raise ValueError(f"{path} has no ORDER: name the ranks of the import order there")


# --- calls


def counted(call: Callable[[], T]) -> tuple[T, Depth]:
    """Make the call, and count the files and frames of the packages that it enters."""
    own = tuple(f"{ROOT / package}/" for package in PACKAGES)
    entered: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(own):
            entered.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return result, Depth(len(set(entered)), len(entered))


def depths_of_calls() -> tuple[Depth, Depth, Depth]:
    """Count look-up, allocation and release of a prompt whose first tokens are cached."""
    manager, random = make_manager(), np.random.default_rng(1)
    cached = fresh(random, CACHED_TOKENS)
    for i in range(1 + NUM_REPETITIONS):
        request = new_request(f"call-{i}", np.concatenate([cached, fresh(random, NEW_TOKENS)]))
        (blocks, num_hit), look_up = counted(partial(manager.get_computed_blocks, request))
        if num_hit != (CACHED_TOKENS if i else 0):
            raise RuntimeError(f"prompt {i} hit {num_hit} of its {CACHED_TOKENS} cached tokens")
        num_new = request.num_tokens - num_hit
        taken, allocate = counted(
            partial(manager.allocate_slots, request, num_new, num_hit, blocks)
        )
        if taken is None:
            raise RuntimeError("the manager found no room")
        request.num_computed_tokens = request.num_tokens
        _, free = counted(partial(manager.free, request))
        manager.take_commands()
    return look_up, allocate, free


def depth_of_step() -> Depth:
    """Count a step in which every row seals a block and takes one, in a pool that is full."""
    manager, random = make_manager(), np.random.default_rng(2)
    for i in range(2 * NUM_BLOCKS * BLOCK_SIZE // CACHED_TOKENS):
        request = new_request(f"fill-{i}", fresh(random, CACHED_TOKENS))
        if manager.allocate_slots(request, CACHED_TOKENS) is None:
            raise RuntimeError("the manager found no room")
        manager.free(request)
    prompts = new_requests(random)
    result = manager.step(StepRequest("client", 1, new=prompts))
    running = one_token_each(result.admitted_slots)
    for step in range(2, 2 + NUM_STEPS):
        manager.take_commands()
        tables = [set(manager.get_block_ids(prompt.request_id)[0]) for prompt in prompts]
        before = set(manager.sealed_contents().block_ids.tolist())
        request_of_step = StepRequest("client", step, completed_step=step - 1, running=running)
        result, depth = counted(partial(manager.step, request_of_step))
    sealed = set(manager.sealed_contents().block_ids.tolist()) - before
    num_sealed = sum(len(table & sealed) for table in tables)
    if not num_sealed == len(result.patches.slots) == NUM_ROWS:
        raise RuntimeError(
            f"{NUM_ROWS} rows sealed {num_sealed} blocks and took {len(result.patches.slots)}"
        )
    return depth


def files_of_cluster_steps() -> tuple[int, int]:
    """Count the files of a decode step in a cluster: of one that fills no block, and of one in
    which every row seals a block and takes one.

    The whole cluster runs in this thread. Every message is encoded and decoded.
    """
    random = np.random.default_rng(3)
    files: list[int] = []
    with (
        LocalCluster(cluster_config(), clock=VirtualClock()) as cluster,
        cluster.client() as client,
    ):
        result = client.step(StepRequest(new=new_requests(random)))
        running = one_token_each(result.admitted_slots)

        def serve() -> StepResult:
            answer = client.step(StepRequest(completed_step=result.step, running=running))
            client.wait_applied(answer.step)
            return answer

        for _ in range(NUM_STEPS):
            result, depth = counted(serve)
            files.append(depth.files)
    return files[-BLOCK_SIZE // 2], files[-1]


def cluster_config() -> ClusterConfig:
    layers = [{"kind": "full", "count": 2, "num_kv_heads": 2, "head_size": 8}]
    return parse_config(
        {
            "name": "structure",
            "model": {"name": "m", "max_model_len": 4096, "dtype": "float16", "layers": layers},
            "cache": {"block_size": BLOCK_SIZE, "memory_per_rank": "2MiB"},
            "parallel": {"tensor_parallel_size": 2},
            "scheduler": {"max_num_seqs": NUM_ROWS, "max_num_batched_tokens": 4096},
            "content_check": {"enabled": False},
        },
        "tools.structure",
    )


def make_manager() -> KVCacheManager:
    group = KVCacheGroupSpec(("layer",), FullAttentionSpec(BLOCK_SIZE, 1, 8))
    config = KVCacheConfig(NUM_BLOCKS, (), (group,))
    return KVCacheManager(config, max_model_len=4096, has_workers=True)


def new_request(name: str, tokens: Int32Array) -> Request:
    return Request(name, tokens, block_hasher=HASHER)


def new_requests(random: np.random.Generator) -> tuple[NewRequest, ...]:
    """Return prompts that end with a full block."""
    num_tokens = 3 * BLOCK_SIZE
    return tuple(
        NewRequest(f"row-{i}", fresh(random, num_tokens), num_tokens) for i in range(NUM_ROWS)
    )


def one_token_each(slots: Int32Array) -> RunningRequests:
    count = len(slots)
    zeros = np.zeros(count, np.int32)
    ones = np.ones(count, np.int32)
    offsets = np.arange(count + 1, dtype=np.int32)
    return RunningRequests(slots, ones, zeros, zeros, offsets, ones)


def fresh(random: np.random.Generator, count: int) -> Int32Array:
    return random.integers(0, 150_000, count, dtype=np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.structure", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    structure = measure()
    for name, label in LABELS.items():
        print(f"{label:78} {getattr(structure, name)!s:>10}")
    if options.json:
        facts = {"python": platform.python_version(), **asdict(structure)}
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
