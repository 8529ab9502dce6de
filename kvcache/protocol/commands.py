"""Commands: what workers must do. One message from the coordinator has commands for every rank.

The manager decides, the coordinator puts the commands of a step into one numbered message for each
worker, and the worker applies them. Commands take effect at two times, because bytes are written by
forwards and not by commands:

    at apply time, in order of `seq`        inside `begin_forward` of their step, in order
    --------------------------------        ------------------------------------------------
    Unlabel, Label, Reset, Fence            BlockTablePatch, Zero, Copy
    Store, Load (start; finish later)       WriteExpected (the forward itself, content checking)
    Spill, Fetch (likewise)
    Discard, SealSlots, Audit

So *applied* never includes bytes. Sizes are checked when messages are decoded, block ids when
commands are applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from kvcache.base.arguments import quickly_made
from kvcache.base.arrays import EMPTY_INT32, Int32Array


@dataclass(frozen=True, eq=False)
class Zero:
    """Fill blocks with zero bytes, all layers, in `begin_forward`."""

    block_ids: Int32Array


@dataclass(frozen=True, eq=False)
class Copy:
    """Copy block `sources[i]` to `destinations[i]`, all layers, in `begin_forward`.

    Copies of one command behave as if all sources were read before any destination is written.
    """

    sources: Int32Array
    destinations: Int32Array


@quickly_made
@dataclass(frozen=True, eq=False)
class BlockTablePatch:
    """Changes of block tables, applied in `begin_forward`.

    Run `i` writes `counts[i]` ids, taken in order from `block_ids`, into the table of group
    `groups[i]`, row `slots[i]`, from column `first_indices[i]` on. Shapes: the first four are
    `(n,)`, `block_ids` is `(sum(counts),)`. Columns after a row's last block are undefined.
    """

    slots: Int32Array
    groups: Int32Array
    first_indices: Int32Array
    counts: Int32Array
    block_ids: Int32Array


@dataclass(frozen=True, eq=False)
class Label:
    """Seal blocks: record the content of each block, at apply time.

    Sent only after the step that scheduled the block's last token is complete on every rank.
    Shapes: `block_ids`, `groups`, `slots` are `(n,)`; `digests` and `parent_digests` are
    `n * digest_bytes` (a first block's parent is the none hash); `token_counts` is `(n,)` and
    `token_ids` `(sum(token_counts),)`; `namespaces[i]` is an index into `namespace_names`;
    `extra_keys` maps an index `i` to that block's canonical extra-key bytes, if it has any.
    """

    block_ids: Int32Array
    groups: Int32Array
    slots: Int32Array
    digests: bytes
    parent_digests: bytes
    token_counts: Int32Array
    token_ids: Int32Array
    namespaces: Int32Array
    namespace_names: tuple[bytes, ...] = ()
    extra_keys: dict[int, bytes] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Unlabel:
    """Drop the labels of blocks, at apply time, before anything writes into the blocks."""

    block_ids: Int32Array


@dataclass(frozen=True, eq=False)
class Store:
    """Start copying device blocks `sources` to slots `destinations` of `medium`.

    Every rank reports the job when its copy has finished.
    """

    job_id: int
    medium: str
    sources: Int32Array
    destinations: Int32Array


@dataclass(frozen=True, eq=False)
class Load:
    """Start copying slots `sources` of `medium` to device blocks `destinations`; reported."""

    job_id: int
    medium: str
    sources: Int32Array
    destinations: Int32Array


@dataclass(frozen=True, eq=False)
class Spill:
    """Start writing slots `sources` of the host medium to `medium`; reported.

    Block `i` has key `i` of `keys`, which are joined and of equal length. The file's label is
    the slot's label.
    """

    job_id: int
    medium: str
    sources: Int32Array
    keys: bytes


@dataclass(frozen=True, eq=False)
class Fetch:
    """Start reading the blocks of `keys` from `medium` into slots `destinations` of the host
    medium; reported.

    Labels come with the blocks. `keys` as in `Spill`.
    """

    job_id: int
    medium: str
    keys: bytes
    destinations: Int32Array


@dataclass(frozen=True, eq=False)
class Discard:
    """Forget the content of slots `slots`, or the blocks of `keys`, in `medium`, at apply time.

    Labels of slots are dropped at once. Blocks are removed after the jobs that were started for
    the same keys before. Not reported: a block left behind by mistake only takes room.
    """

    medium: str
    slots: Int32Array
    keys: bytes


@dataclass(frozen=True, eq=False)
class SealSlots:
    """Seal slots of `medium`: every rank has reported that their bytes are complete.

    A process that attaches to the memory later uses sealed slots only.
    """

    medium: str
    slots: Int32Array


@dataclass(frozen=True)
class Reset:
    """Drop every label of a device block. `model_epoch` is the new one: labels of host slots of an
    earlier one are dropped, too."""

    model_epoch: int


@dataclass(frozen=True)
class Fence:
    """Refuse forwards of client `client_id` from now on: it was given up."""

    client_id: str


@dataclass(frozen=True, eq=False)
class WriteExpected:
    """A content-checked forward: writes what an engine would compute, from the tokens alone.

    Every rank does this in `begin_forward` of its step, in this order. It verifies all live blocks
    of `verify_slots` by the old tables (requests that finished or were preempted, before their
    blocks are used again); applies patches, zeroes and copies; verifies the states that the rows
    continue; writes the positions `[starts[i], starts[i] + counts[i])` of every row `i`. Then it
    verifies the positions `[0, starts[i])` of every row that `is_new[i]` (its cache hit), which may
    be in blocks that another row of the step has just written, and the blocks that nothing reads
    after the rows. Reported as a job.

    The tokens of row `i` are `token_counts[i]` ids of `token_ids`, in the order of rows: for a new
    row those of the positions `[0, starts[i] + counts[i])`, otherwise only the tokens that this
    rank has not seen. `token_starts[i]` is the position of a row's first token here, so that
    rejected drafts are overwritten. `content_keys[i]` distinguishes contents with equal tokens
    (LoRA, salt, images); it matters for new rows only.

    The first `external_counts[i]` positions of a new row come from elsewhere and are written only
    here. Of them and of the hit, only positions that are read later are verified. The last
    `draft_counts[i]` positions are drafts: a layer with states writes one after the row's own
    tokens and one after each draft. A new row's `encoder_counts[i]` encoder tokens are written with
    it, as `encoder_keys[i]` demands. These four arrays may be empty if no row has any.

    Shapes: all `(n,)` but `verify_slots`, `verify_lengths` `(m,)` and `token_ids`
    `(sum(token_counts),)`.
    """

    job_id: int
    verify_slots: Int32Array
    verify_lengths: Int32Array
    slots: Int32Array
    is_new: Int32Array
    starts: Int32Array
    counts: Int32Array
    token_starts: Int32Array
    token_counts: Int32Array
    token_ids: Int32Array
    content_keys: tuple[bytes, ...] = ()
    external_counts: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    draft_counts: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    encoder_counts: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    encoder_keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, eq=False)
class Audit:
    """Compare the labels of the blocks `[first_block, end_block)` with the given contents.

    At apply time, after every other command of the message; reported as a job. Shapes as in
    `SealedContents`: `block_ids` are all blocks there that have a label, in rising order.
    """

    job_id: int
    first_block: int
    end_block: int
    block_ids: Int32Array
    groups: Int32Array
    digests: bytes


Command: TypeAlias = (
    Zero
    | Copy
    | BlockTablePatch
    | Label
    | Unlabel
    | Store
    | Load
    | Spill
    | Fetch
    | SealSlots
    | Discard
    | Reset
    | Fence
    | WriteExpected
    | Audit
)
"""The commands that a message may contain. A worker refuses an unknown kind; it skips none."""

EMPTY_PATCH = BlockTablePatch(EMPTY_INT32, EMPTY_INT32, EMPTY_INT32, EMPTY_INT32, EMPTY_INT32)
"""No change of any block table."""
