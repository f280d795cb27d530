"""How many threads and blocks a kernel of ours gets: a function of the shapes alone, since the order of sums follows from it."""

from __future__ import annotations

from minidnn.errors import UserError

THREADS = 256
SCRATCH_BYTES = 256 << 10  # partial sums of a reduction: what a kernel may have without declaring it
FINAL_CHANNELS, FINAL_LANES = 32, 32  # shape of a block that adds partial sums; as in common.cuh
MOST_BLOCKS = 264
"""Of a reduction: all of them at once on a GPU of 132 multiprocessors, so that none waits for a second turn."""
ROW_BLOCKS = 2048  # of a kernel that walks rows and joins nothing
MOST_COLUMNS, LEAST_COLUMNS = 32, 8  # threads across channels: 512 and 128 neighbouring bytes
LONGEST_GRID = 65535  # blocks along y


def flat_blocks(size: int, width: int) -> int:
    """Blocks of an element-wise kernel: one thread a pack, and one for each element of the rest."""
    return -(-(size // width + size % width) // THREADS)


def block_shape(channels: int, width: int, most_columns: int = MOST_COLUMNS) -> tuple[int, int]:
    """Threads across channels and across rows: a power of two each, 256 in all."""
    packs = -(-channels // width)
    columns = min(most_columns, 1 << (packs - 1).bit_length())
    return columns, THREADS // columns


def enough_columns(channels: int, width: int, blocks: int) -> int:
    """Threads across channels, at least eight, so few that ``blocks`` along the rows make a gridful of blocks."""
    columns = MOST_COLUMNS
    while columns > LEAST_COLUMNS and blocks * -(-channels // (columns * width)) < MOST_BLOCKS // 2:
        columns //= 2
    return columns


def reduction_shape(rows: int, channels: int, values: int, width: int) -> tuple[int, int, int]:
    """Threads across channels and rows, and blocks along rows: a function of the shape alone.

    As many blocks as the scratch holds partial sums of, at most MOST_BLOCKS in all, and at least eight rows a thread.
    """
    held = SCRATCH_BYTES // (4 * values * channels)
    if not held:
        raise UserError(
            f"a sum over {channels} channels needs {4 * values * channels} bytes of scratch and has {SCRATCH_BYTES}; "
            f"use at most {SCRATCH_BYTES // (4 * values)} channels"
        )
    columns, lanes = block_shape(channels, width, enough_columns(channels, width, held))
    across = -(-channels // (columns * width))
    return columns, lanes, max(1, min(held, MOST_BLOCKS // across, -(-rows // (8 * lanes)), LONGEST_GRID))
