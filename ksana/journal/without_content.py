"""Messages that a redacted journal holds as they are."""

from __future__ import annotations

import typing

from ksana.messages.blocks import BlocksPlanned, ResetPools
from ksana.messages.remote import (
    AllocateBlocksForRemoteCache,
    BlocksHeld,
    CancelLoad,
    ConfirmRemoteCacheLoadingResult,
    DropRemoteCacheLoading,
    HoldBlocks,
    PrefixBlockNumber,
    PrefixLoaded,
    ReleaseHeldBlocks,
    RemoteBlocksAllocated,
    RemoteCallRefused,
    RemoteLoadingConfirmed,
)
from ksana.messages.requests import Abort, Drain
from ksana.messages.staging import CopyFromStaging, CopyToStaging, StagingCopied
from ksana.messages.steps import WorkerReady
from ksana.messages.swa import SwaBatch, SwaBatchDone
from ksana.messages.swa_remote import SwaAnswer, SwaCall

WITHOUT_CONTENT: frozenset[type] = frozenset(
    {
        Abort,
        Drain,
        BlocksPlanned,
        ResetPools,
        CancelLoad,
        PrefixLoaded,
        PrefixBlockNumber,
        AllocateBlocksForRemoteCache,
        RemoteBlocksAllocated,
        ConfirmRemoteCacheLoadingResult,
        RemoteLoadingConfirmed,
        DropRemoteCacheLoading,
        RemoteCallRefused,
        HoldBlocks,
        BlocksHeld,
        ReleaseHeldBlocks,
        CopyFromStaging,
        CopyToStaging,
        StagingCopied,
        WorkerReady,
        SwaBatch,
        SwaBatchDone,
        *typing.get_args(SwaCall),
        *typing.get_args(SwaAnswer),
    }
)
"""Messages of numbers, and of words that are the same for every prompt."""
