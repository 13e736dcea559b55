# SPDX-License-Identifier: Apache-2.0
"""Calls of an update: what the API server asks of the engine core, and what the engine core asks of its ranks."""

from enum import StrEnum


class Operation(StrEnum):
    """Operations of the update engine, by the name under which they cross the process boundary."""

    JOIN = "join"
    STATUS = "status"
    MANIFEST = "manifest"
    OPEN = "open"
    CHECK = "check"
    STAGE = "stage"
    WITHDRAW = "withdraw"
    POLL = "poll"
    UPDATE = "update"
    PREPARE = "prepare"
    COMMIT = "commit"
    ABANDON = "abandon"
    ROLLBACK = "rollback"
    DECLARE_CURRENT = "declare_current"
    LEAVE = "leave"
    DIGESTS = "digests"
    VERIFY = "verify"
    KV_SCALES = "kv_scales"
    MAY_SLEEP = "may_sleep"
    NATIVE_INIT = "native_init"
    NATIVE_SHUTDOWN = "native_shutdown"
    NATIVE_START = "native_start"
    NATIVE_UPDATE = "native_update"
    NATIVE_FINISHING = "native_finishing"
    NATIVE_FAILED = "native_failed"
    NATIVE_RELABEL = "native_relabel"

    @property
    def only_reads(self) -> bool:
        """True if it is called while no update is under way."""
        return self in (Operation.JOIN, Operation.STATUS, Operation.MANIFEST, Operation.KV_SCALES)

    @property
    def needs_weights(self) -> bool:
        """True if it touches weights, which a sleeping engine has not."""
        return not self.only_reads and self not in (
            Operation.UPDATE,
            Operation.POLL,
            Operation.ABANDON,
            Operation.LEAVE,
            Operation.MAY_SLEEP,
            Operation.NATIVE_FAILED,
            Operation.NATIVE_RELABEL,
        )


class RankMethod(StrEnum):
    """Methods of `update.worker.rank.Rank` that the engine calls on every rank.

    `kv.…` are those of its `RankKv`, `loads.…` those of its `Loads`.
    """

    DESCRIBE = "describe"
    WARM_UP = "warm_up"
    STAGE = "stage"
    DROP = "drop"
    COPY_UNSENT = "copy_unsent"
    FINGERPRINT_SHADOW = "fingerprint_shadow"
    RUN_CANARY = "run_canary"
    OBSERVE_KV = "observe_kv"
    POLL = "poll"
    SWAP = "swap"
    WAIT_FOR_SWAP = "wait_for_swap"
    FINGERPRINT = "fingerprint"
    DIGESTS = "digests"
    CLOSE_SOURCES = "close_sources"
    SAVE_CONSTANTS = "save_constants"
    RESTORE = "restore"
    KV_SERVED = "kv.served"
    KV_STAGE = "kv.stage"
    KV_RECORDED = "kv.recorded"
    KV_RESCALE = "kv.rescale"
    LOADS_PERMIT = "loads.permit"
    LOADS_TAKE = "loads.take"
