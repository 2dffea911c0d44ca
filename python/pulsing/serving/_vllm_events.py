"""What vLLM says of its KV cache: read from the engine's process, over a socket file that only this user can open."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from pulsing.serving._token_blocks import TokenBlocks

__all__ = ["EventSocket", "KvNews", "follow"]

_log = logging.getLogger("pulsing.serving")

# Groups of layers whose blocks tell what a prompt has left: those that see all of it.
_WHOLE = (None, "full_attention", "mla_attention", "sink_full_attention")

# The cache that the engine computes with, on a CPU too. What a connector keeps elsewhere has events of its own.
_OWN = (None, MEDIUM_GPU)
# Longest name of a socket file that systems take, less what is added to it.
_LONGEST = 90


class EventSocket:
    """Where the engine's process tells, and how it is told to."""

    def __init__(self) -> None:
        # Only its owner may enter such a directory: prompts travel here.
        self.folder = Path(tempfile.mkdtemp(prefix="pulsing-kv-"))
        if len(str(self.folder)) > _LONGEST:
            self.close()
            self.folder = Path(tempfile.mkdtemp(prefix="pulsing-kv-", dir="/tmp"))
        self.endpoint = f"ipc://{self.folder / 'events'}"

    def config(self) -> KVEventsConfig:
        """vLLM's own words for it."""
        return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=self.endpoint)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.folder, ignore_errors=True)


async def follow(endpoints: Sequence[str], blocks: TokenBlocks, model: str) -> None:
    """Tell ``blocks`` what the engine says, until cancelled.

    Args:
        endpoints: where the engine's publishers are.
        blocks: who is told.
        model: the model's name, for messages.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    expected: dict[int, int] = {}
    news = KvNews(blocks)
    try:
        # A limit would lose news in a rush; memory is bounded by what the engine itself holds back.
        socket.set_hwm(0)
        for endpoint in endpoints:
            socket.connect(endpoint)
        socket.subscribe(b"")
        while True:
            _, number, payload = await socket.recv_multipart()
            batch = decoder.decode(payload)
            rank, sequence = batch.data_parallel_rank or 0, int.from_bytes(number, "big")
            if sequence != expected.get(rank, sequence):
                _log.warning("%s: vLLM's news of its KV cache was lost; what Routers know of it is forgotten", model)
                blocks.cleared()
            expected[rank] = sequence + 1
            for event in batch.events:
                news.hear(event)
    finally:
        context.destroy(linger=0)


class KvNews:
    """Passes on what vLLM's events say of the engine's own cache, and of prompts as such.

    Args:
        blocks: who is told.
    """

    def __init__(self, blocks: TokenBlocks) -> None:
        self._blocks = blocks
        # Groups of layers that see all of a prompt; what has become of a block there decides.
        self._groups: set[int | None] = {None}

    def hear(self, event: Any) -> None:
        """One event, whatever it is."""
        if isinstance(event, BlockStored):
            if event.medium not in _OWN or event.kv_cache_spec_kind not in _WHOLE:
                return
            self._groups.add(event.group_idx)
            # Salted blocks, and those of adapters and images, are found again only by requests that have the same.
            if not any(event.extra_keys or ()):
                self._blocks.stored(event.parent_block_hash, event.block_hashes, event.token_ids, event.block_size)
        elif isinstance(event, BlockRemoved):
            if event.medium in _OWN and event.group_idx in self._groups:
                self._blocks.removed(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            self._blocks.cleared()
