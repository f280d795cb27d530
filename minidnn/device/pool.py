"""CuPy's two memory pools as arithmetic: what an allocator that does not know the future holds for the same requests.

No memory is touched and no device is needed: ``malloc`` and ``free`` only count. The rules are those of
``cupy.cuda.MemoryPool`` and ``cupy.cuda.PinnedMemoryPool`` as read in the source of CuPy 14. A device whose pool has memory
behind it overrides ``allocate`` (``minidnn.device.cuda_pool``): the arithmetic is the same, so the prediction is exact.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from minidnn.errors import UserError
from minidnn.spec import BLOCK_BYTES, round_up


class PoolOutOfMemory(UserError, MemoryError):
    """The pool would hold more than its limit, even after it gave back what it could.

    Attributes: ``nbytes`` asked for (rounded), ``used_bytes`` in use, ``held_bytes`` held (used and cached), ``limit``.
    ``used_bytes + nbytes <= limit`` means that only fragmentation is to blame.
    """

    def __init__(self, nbytes: int, used_bytes: int, held_bytes: int, limit: int) -> None:
        super().__init__(
            f"the pool holds {held_bytes} bytes, {used_bytes} of them in use, and cannot add {nbytes} under its limit "
            f"of {limit}; raise the limit, or use the slab, whose offsets are planned"
        )
        self.nbytes = nbytes
        self.used_bytes = used_bytes
        self.held_bytes = held_bytes
        self.limit = limit


class _Chunk:
    """A part of one device allocation, which lives as long as any part, with its neighbours in it."""

    __slots__ = ("allocation", "following", "free", "nbytes", "offset", "preceding", "stream")

    def __init__(self, nbytes: int, stream: str, allocation: Any, offset: int) -> None:
        self.nbytes = nbytes
        self.stream = stream
        self.allocation = allocation
        self.offset = offset
        self.free = False
        self.preceding: _Chunk | None = None
        self.following: _Chunk | None = None


class _Arena:
    """Free chunks of one stream: sizes in order, and the chunks of each size."""

    __slots__ = ("chunks", "sizes")

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.chunks: dict[int, list[_Chunk]] = {}

    def add(self, chunk: _Chunk) -> None:
        if chunk.nbytes not in self.chunks:
            insort(self.sizes, chunk.nbytes)
            self.chunks[chunk.nbytes] = []
        self.chunks[chunk.nbytes].append(chunk)
        chunk.free = True

    def remove(self, chunk: _Chunk) -> None:
        same_size = self.chunks[chunk.nbytes]
        same_size.remove(chunk)
        if not same_size:
            del self.chunks[chunk.nbytes]
            del self.sizes[bisect_left(self.sizes, chunk.nbytes)]
        chunk.free = False

    def best_fit(self, nbytes: int) -> _Chunk | None:
        """Take the smallest free chunk of at least ``nbytes``; of equal ones the last freed (CuPy: any)."""
        at = bisect_left(self.sizes, nbytes)
        if at == len(self.sizes):
            return None
        chunk = self.chunks[self.sizes[at]][-1]
        self.remove(chunk)
        return chunk


class PoolModel:
    """``cupy.cuda.MemoryPool`` with ``set_limit``, for one device.

    A request is rounded up to 512 bytes. It takes the smallest free chunk that is large enough in the arena of its
    stream, and splits it whatever the sizes; chunks of other streams are not seen. Without one the pool asks the device
    for exactly the size. A freed chunk goes back to the stream it was born on and merges with free neighbours of the
    same allocation. The limit counts what the pool holds, used or not: over it, allocations that are free as a whole go
    back to the device, those of every stream; pieces of an allocation still in use partly cannot.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used_bytes = 0
        self.held_bytes = 0
        self.peak_used_bytes = 0
        self.peak_held_bytes = 0
        self.device_allocations = 0  # requests the device saw
        self._arenas: dict[str, _Arena] = {}
        self._in_use: dict[int, _Chunk | None] = {}
        self._next_block = 0

    def malloc(self, nbytes: int, stream: str = "compute") -> int:
        """Take ``nbytes`` while ``stream`` is current; return a block number. Raises PoolOutOfMemory."""
        assert nbytes >= 0, nbytes
        chunk = self._take(round_up(nbytes), stream) if nbytes else None  # nothing is held for nothing
        self._next_block += 1
        self._in_use[self._next_block] = chunk
        if chunk is not None:
            self.used_bytes += chunk.nbytes
            self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
            self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)
        return self._next_block

    def free(self, block: int) -> None:
        """Give a block back to the pool, whatever the current stream. The pool keeps holding it."""
        assert block in self._in_use, f"block {block} is not in use"
        chunk = self._in_use.pop(block)
        if chunk is None:
            return
        self.used_bytes -= chunk.nbytes
        arena = self._arena(chunk.stream)
        if chunk.following is not None and chunk.following.free:
            arena.remove(chunk.following)
            _merge(chunk, chunk.following)
        if chunk.preceding is not None and chunk.preceding.free:
            left = chunk.preceding
            arena.remove(left)
            _merge(left, chunk)
            chunk = left
        arena.add(chunk)

    def free_all_blocks(self) -> None:
        """Return to the device every allocation that is free as a whole, of all streams. Split ones stay."""
        for arena in self._arenas.values():
            for chunks in list(arena.chunks.values()):
                for chunk in list(chunks):
                    if chunk.preceding is None and chunk.following is None:
                        arena.remove(chunk)
                        self.held_bytes -= chunk.nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes held and not used."""
        return self.held_bytes - self.used_bytes

    @property
    def largest_hole(self) -> int:
        """Bytes of the largest free chunk: the largest request that needs nothing from the device, on its stream."""
        return max((arena.sizes[-1] for arena in self._arenas.values() if arena.sizes), default=0)

    @property
    def fragmentation(self) -> float:
        """Share of the free bytes outside the largest hole: 0 is one hole or none, near 1 is crumbs."""
        return 1.0 - self.largest_hole / self.free_bytes if self.free_bytes else 0.0

    def _arena(self, stream: str) -> _Arena:
        return self._arenas.setdefault(stream, _Arena())

    def _take(self, nbytes: int, stream: str) -> _Chunk:
        arena = self._arena(stream)
        chunk = arena.best_fit(nbytes)
        if chunk is None:
            return self._grow(nbytes, stream)
        if chunk.nbytes > nbytes:
            rest = _Chunk(chunk.nbytes - nbytes, stream, chunk.allocation, chunk.offset + nbytes)
            rest.preceding, rest.following = chunk, chunk.following
            if chunk.following is not None:
                chunk.following.preceding = rest
            chunk.nbytes, chunk.following = nbytes, rest
            arena.add(rest)
        return chunk

    def _grow(self, nbytes: int, stream: str) -> _Chunk:
        if self.limit is not None and self.held_bytes + nbytes > self.limit:
            self.free_all_blocks()
            if self.held_bytes + nbytes > self.limit:
                raise PoolOutOfMemory(nbytes, self.used_bytes, self.held_bytes, self.limit)
        allocation = self.allocate(nbytes)
        self.held_bytes += nbytes
        self.device_allocations += 1
        return _Chunk(nbytes, stream, allocation, 0)

    def allocate(self, nbytes: int) -> Any:
        """Ask the device for memory of its own, given back when nothing refers to the result. Here: nothing to ask for."""
        return None

    def place(self, block: int) -> tuple[Any, int]:
        """The allocation in which a block lies, and its offset there; (None, 0) for a block of nothing."""
        chunk = self._in_use[block]
        return (None, 0) if chunk is None else (chunk.allocation, chunk.offset)


def _merge(left: _Chunk, right: _Chunk) -> None:
    left.nbytes += right.nbytes
    left.following = right.following
    if right.following is not None:
        right.following.preceding = left


class PinnedPoolModel:
    """``cupy.cuda.PinnedMemoryPool``: blocks of powers of two, reused for the same size alone, never given back.

    It knows neither streams nor a limit.
    """

    def __init__(self) -> None:
        self.used_bytes = 0
        self.held_bytes = 0
        self.peak_used_bytes = 0
        self._free: dict[int, list[Any]] = {}  # memory of blocks, by size
        self._in_use: dict[int, tuple[int, Any]] = {}
        self._next_block = 0

    def allocate(self, nbytes: int) -> Any:
        """Ask for pinned memory. Here: nothing to ask for."""
        return None

    def place(self, block: int) -> Any:
        """The memory of a block."""
        return self._in_use[block][1]

    def malloc(self, nbytes: int) -> int:
        """Take ``nbytes``, rounded up to the next power of two and at least 512; return a block number."""
        assert nbytes >= 0, nbytes
        size = max(BLOCK_BYTES, 1 << (nbytes - 1).bit_length()) if nbytes else 0
        if self._free.get(size):
            memory = self._free[size].pop()
        else:
            memory = self.allocate(size)
            self.held_bytes += size
        self._next_block += 1
        self._in_use[self._next_block] = size, memory
        self.used_bytes += size
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        return self._next_block

    def free(self, block: int) -> None:
        """Give a block back to the free list of its size."""
        assert block in self._in_use, f"block {block} is not in use"
        size, memory = self._in_use.pop(block)
        self.used_bytes -= size
        self._free.setdefault(size, []).append(memory)
