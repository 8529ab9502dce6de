"""Every guard of the protocol, in a sentence each; each can be removed.

`Rules()` has them all; `Rules(exact=False)` removes one. The model checks a rule where the
protocol's code has the guard.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields


def _rule(sentence: str) -> bool:
    guard: bool = field(default=True, metadata={"sentence": sentence})
    return guard


@dataclass(frozen=True)
class Rules:
    """The active guards."""

    # Delivery and identity.
    exact: bool = _rule("A worker applies each number of its epoch once and in order.")
    present_epoch: bool = _rule("A worker refuses messages of another epoch than the granted one.")
    nonce: bool = _rule("Every message carries its coordinator's nonce: epochs may come again.")
    grant_first: bool = _rule("A worker process applies nothing before a grant to itself.")
    grant_above: bool = _rule("A worker grants only an epoch above every one it granted before.")
    epoch_above: bool = _rule("A coordinator that is refused takes an epoch above the refusing.")
    superseded: bool = _rule("A ruling coordinator that is refused stops and tells its clients.")
    saved_forward: bool = _rule(
        "A coordinator does not replace what another one with a higher epoch has saved."
    )
    forward_epoch: bool = _rule("A forward names its epoch and is refused in another one.")
    report_epoch: bool = _rule("Reports name their epoch; those of another one are dropped.")
    report_ranks: bool = _rule("Reports are a set of ranks, not a count.")
    report_repeat: bool = _rule("A report is repeated until it is acknowledged.")
    applied_all: bool = _rule("A message is kept until every rank has applied it.")
    window: bool = _rule("Nothing is executed while the window of messages is full.")
    stored_answer: bool = _rule("A repeated step number gets the stored answer.")
    steps_go_on: bool = _rule("Step numbers never restart; what an older epoch scheduled is void.")
    # Bytes and blocks.
    forward_order: bool = _rule("Forwards run one at a time, in order of their numbers.")
    step_reference: bool = _rule("A block of a step that is not over is no target of a copy.")
    transfer_reference: bool = _rule("A block that a copy reads is not given away.")
    source_hold: bool = _rule("The source of a late copy stays held until every rank reported.")
    destination_quarantine: bool = _rule(
        "The destination of a late copy is quarantined until every rank reported."
    )
    host_hold: bool = _rule("A host slot is not overwritten while a copy reads it.")
    copy_in_forward: bool = _rule("Copy-on-write copies run when the forward of their step begins.")
    settle: bool = _rule("A load first executes the put-off copies that touch its block.")
    unlabel_first: bool = _rule("A label is withdrawn before the first write into its block.")
    host_unlabel_first: bool = _rule("A host label is withdrawn before its slot is overwritten.")
    seal_late: bool = _rule("A block is sealed only after its step is reported complete.")
    host_seal_command: bool = _rule("Host labels are written by command after every rank finished.")
    visible_all: bool = _rule("The result of a copy is visible when every rank has finished.")
    own_unsealed: bool = _rule("An unsealed block is hit only by the client that computes it.")
    tail_first: bool = _rule("A block is not evicted before the cached ones that continue it.")
    # Files.
    rename: bool = _rule("A file gets its name when it is complete.")
    file_verified: bool = _rule("A damaged or foreign file is a miss.")
    # Failure.
    cascade: bool = _rule("A failed step fails every later one that is scheduled.")
    fail_late: bool = _rule("A step is reported failed when no rank can begin or run it.")
    fence: bool = _rule("A client that is given up is fenced before its blocks are freed.")
    fence_waits: bool = _rule("A fence is applied when no forward of its client runs.")
    leaving: bool = _rule(
        "A client that leaves is no longer served, and its name is never used again."
    )
    wait_copies: bool = _rule("A grant waits until copies of the old epoch have ended.")
    wait_forwards: bool = _rule("A grant waits until forwards of the old epoch have ended.")
    loss_is_epoch: bool = _rule("The loss of a worker process begins another epoch.")
    all_ranks: bool = _rule("A rebuild keeps only what every rank agrees on.")
    no_orphans: bool = _rule("A rebuild drops what continues a block that was not kept.")
    one_of_equals: bool = _rule("A rebuild keeps one block of equal content.")
    withdraw_dropped: bool = _rule("A rebuild withdraws the labels that it does not keep.")
    attach_verify: bool = _rule("An attaching request keeps only blocks sealed with its content.")
    model_epoch_saved: bool = _rule("A model epoch is saved before the reset returns.")
    model_epoch_unknown: bool = _rule(
        "A coordinator that finds nothing saved takes a model epoch above all it finds in labels "
        "and files."
    )
    model_epoch_stated: bool = _rule("An attaching client states its model epoch; another is cold.")
    empty_step: bool = _rule("An idle engine reports its last step complete by an empty one.")


RULES: dict[str, str] = {rule.name: rule.metadata["sentence"] for rule in fields(Rules)}
"""The sentence of every rule, by name."""
