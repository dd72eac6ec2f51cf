"""How block attention is cut up for an NVIDIA GPU."""

from dataclasses import dataclass

from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.choose import PROCESSORS
from pallas_kernels.tiles import LEAST, power_of_two

MOST_SPLITS = 64
# Up to so many splits a merge costs no more for every second of them being nearly empty.
MOST_SPARE = 16


@dataclass(frozen=True)
class Tile:
    """Work of a program: query rows, keys at a time, programs that share a context."""

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


def own_tile(q: Array, cache: Array, window: int | None) -> Tile:
    """Tiles that neither spill registers nor exceed shared memory on an H200."""
    R, T, N, H = q.shape
    K, S = cache.shape[1:3]
    context = S if window is None else min(S, window)
    if q.dtype.itemsize == 4:
        # fp32 products use no tensor cores: small tiles, or registers spill.
        rows, keys, warps, stages = LEAST, LEAST, 4, 1
    else:
        rows = min(max(LEAST, power_of_two(T * (N // K))), 64)
        if rows > LEAST and H > 128:
            # Of wide heads 32 rows spill (144 bytes a thread at width 256, 1188 at 512), 64 do not.
            rows = 64
        keys = 64 if H <= 256 else 32
        if R * K * pl.cdiv(T * (N // K), rows) * pl.cdiv(context, keys) <= PROCESSORS // 4:
            # Most processors would stay idle: keys are read more than once then, from the cache.
            rows = LEAST
        warps = 8 if H > 256 and rows > LEAST else 4
        stages = 3 if H <= 128 else 2
        if rows == LEAST and 128 < H <= 256 and R * K > PROCESSORS // 4:
            # More programs a processor: 42.5 us in place of 45.2 for Qwen3.5 at batch 32, 16.9 in
            # place of 19.9 for a window of Gemma 4; at batch 1 it is the other way around.
            keys, stages = 32, 3
        elif rows > LEAST and 128 < H <= 256 and window is not None:
            # Few keys a program: 21.0 us in place of 24.6 for Gemma 4 at batch 32, 14.0 in place of
            # 14.1 at 8.
            keys, stages = 32, 3
    programs = R * K * pl.cdiv(T * (N // K), rows)
    # Programs with many query rows fill a processor, two with few share one.
    room = PROCESSORS if rows > LEAST else 2 * PROCESSORS
    tiles = pl.cdiv(context, keys)
    wanted = min(room // programs, tiles, MOST_SPLITS)
    splits = 1 << (max(wanted, 1).bit_length() - 1)
    if splits == tiles and 2 * splits <= min(room // programs, MOST_SPARE):
        # One more for the block's own keys.
        splits *= 2
    return Tile(rows=rows, keys=keys, splits=splits, warps=warps, stages=stages)
