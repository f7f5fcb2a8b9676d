"""Changes after which everything happens as before, and why; they count neither as noticed nor as missed."""

from __future__ import annotations

from tests.mutation.sites import Mutant

MOMENT = "a single microsecond of a clock falls on the one side or on the other"
TRUTH = "asked for its truth alone"
CALM = "nothing in this callback raises; it would be a second line of defence"
SIZES = "in what steps rows are claimed or read"
DIGITS = "to how many digits of a second a line of the history is rounded"
NOT_NULL = "the comparison beside it is false for NULL, and both databases know from it that the partial index serves"

OWNED = "the table lets only a running job have an owner"
AGAIN = "the look that has just locked the row has asked it already; it stands here once more for a reader's peace"

EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("store:_ASKED_TO_STOP", "c.status = 'running'", "1 = 1"): OWNED,
    ("store:_ANNOUNCE", "<", "<="): MOMENT,
    ("store:_CLAIM_LIMITED", "<=", "<"): MOMENT,
    ("store:_CLAIM_LIMITED", "AND c.next_run_at IS NOT NULL", ""): NOT_NULL,
    ("store:_CLAIM_ONE", "<=", "<"): MOMENT,
    ("store:_CLAIM_ONE", "AND c.next_run_at IS NOT NULL", ""): NOT_NULL,
    (
        "store:_CLAIM_ONE",
        "AND {open}",
        "",
    ): "asked of each row as well; here it spares the walk over a paused backlog",
    ("store:_CLAIM_SIZES", "32", "33"): SIZES,
    ("store:_CLAIM_SIZES", "64", "65"): SIZES,
    ("store:_COMPLETE_MANY", "{job}.status = 'running'", "1 = 1"): OWNED,
    ("store:_COUNT_BY_HAND", "status = 'running'", "1 = 1"): OWNED,
    ("store:_COUNT_OF_KIND", "status = 'running'", "1 = 1"): OWNED,
    ("store:_DUE_SCOPES", "AND c.next_run_at IS NOT NULL", ""): NOT_NULL,
    ("store:_FORGET_WORKERS", "<", "<="): MOMENT,
    ("store:_IS_DUE", "AND c.next_run_at IS NOT NULL", ""): NOT_NULL,
    (
        "store:_LEASED",
        "AND lease_owner IS NOT NULL",
        "",
    ): "a lease that was let go has run out at that moment",
    ("store:_LEASED", "status = 'running'", "1 = 1"): OWNED,
    ("store:_LONG_AGO", "1", "2"): "before any job that there can be",
    ("store:_LONG_AGO", "1970", "1971"): "before any job that there can be",
    ("store:_ORPHANS", "<", "<="): MOMENT,
    ("store:_PRUNE_BATCH", "<", "<="): MOMENT,
    ("store:_PRUNE_BATCH", "c.finished_at IS NOT NULL", "1 = 1"): NOT_NULL,
    ("store:_SETTLE", "<", "<="): MOMENT,
    ("store:_STRANGERS", "status = 'running'", "1 = 1"): OWNED,
    ("store:_claim_next", "AND c.next_run_at IS NOT NULL", ""): NOT_NULL,
    (
        "store:_claim_next",
        "{{open}}",
        "1 = 1",
    ): "asked of each row as well; here it spares the walk over a paused backlog",
    (
        "store:_joining",
        'connection.vendor == "postgresql"',
        "False",
    ): "a transaction of one statement instead of that statement",
    ("store:_snippets.over", "<=", "<"): MOMENT,
    ("store:_snippets.strict", "AND lease_epoch = :epoch", ""): AGAIN,
    ("store:_snippets.strict", "AND lease_owner = :owner", ""): AGAIN,
    ("store:_snippets.strict", "AND status = 'running'", ""): AGAIN,
    ("lifecycle:_Committed.__init__", "True", "False"): CALM,
    ("lifecycle:conclude", "True", "False"): CALM,
    ("lifecycle:reopen", "True", "False"): CALM,
    ("reconciler:Reconciler._announce_waiting", "<", "<="): MOMENT,
    (
        "reconciler:Reconciler._announce_waiting",
        "route.due_in > transport.reach",
        "False",
    ): "the statement asks for it as well; here it spares a look",
    ("reconciler:Reconciler._redrive", "3", "4"): DIGITS,
    (
        "reconciler:Reconciler._repair",
        "self._sightings.pop(orphan.id, None)",
        "pass",
    ): "the epoch has grown with the repair, and the next pass forgets it",
    ("reconciler:Reconciler._report_lock", "<=", "<"): MOMENT,
    ("reconciler:Reconciler._seen_before", "False", "None"): TRUTH,
    ("reconciler:Reconciler._settle_cancels", "<=", "<"): MOMENT,
    (
        "reconciler:Reconciler.tick",
        "database.drop_broken(database.alias())",
        "pass",
    ): "the write that begins the next pass makes a new connection as well",
    ("reconciler:repair_once", "0.01", "1.01"): "a little more than the grace; how little is of no account",
    ("reconciler:repair_once", "100", "101"): SIZES,
    ("reconciler:spacing", "16", "17"): "the power is cut far above the longest wait",
    ("receipts:ExecutionContext.check_active", ">=", ">"): MOMENT,
    ("receipts:_announce", "True", "False"): CALM,
    ("receipts:_finalize", "10", "11"): "longer than any text that can be; it is cut afterwards",
    ("receipts:_foreign", '""', "None"): TRUTH,
    ("receipts:finalize_atomically", ">=", ">"): MOMENT,
    ("receipts:require_claimable", "before is None", "False"): "where there is no row there is no job either",
}
"""By module and owner, old text, new text, with blanks as one."""


def reason_of(mutant: Mutant) -> str:
    return EQUIVALENT.get(key_of(mutant), "")


def key_of(mutant: Mutant) -> tuple[str, str, str]:
    old, new = (" ".join(text.split()) for text in (mutant.old, mutant.new))
    return f"{mutant.module}:{mutant.owner}", old, new
