"""What is timed of each kernel: loops over layers, with the reference and several tile sizes."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention_heads, block_attention, gated_delta_step
from pallas_kernels.attention_heads import cases as heads_cases
from pallas_kernels.attention_heads import splits as parts_of_heads
from pallas_kernels.block_attention import cases as attention_cases
from pallas_kernels.block_attention import gpu_tile as attention_tile
from pallas_kernels.gated_delta import cases as delta_cases
from pallas_kernels.gated_delta import gpu as delta_gpu
from pallas_kernels.parts import product_parts
from pallas_kernels.product import product

LAYERS = 8
"""Of a loop: their caches do not fit the chip."""


@dataclass(frozen=True)
class Time:
    """Time every kernel beside its reference, with several tile sizes."""

    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 1024
    """Length of every row."""
    only: str = ""
    """Part of the names of the cases to run."""
    tiles: bool = True
    """Also other tile sizes than the kernel's own choice."""
    report: Path | None = None


@dataclass(frozen=True)
class Trial:
    """A compiled loop, what it takes, its description and the fewest bytes a step must move."""

    compiled: Callable[..., Any]
    arguments: tuple[Any, ...]
    described: dict[str, Any]
    bytes_moved: int


def in_parts(rows: Any, matrix: Any, number: int) -> Any:
    """As `layers.linear.projected` makes them of a projection."""
    if number > 1:
        return product_parts(rows, matrix, number)
    return product(rows, matrix)[None]


def _attention_tiles(case: attention_cases.Case, q: Any, cache: Any) -> list[Any]:
    own = attention_tile.own_tile(q, cache, case.window)
    changes: list[dict[str, int]] = [{}]
    halves = (own.splits // 2, own.splits * 2)
    changes += [{"splits": splits} for splits in halves if 1 <= splits <= 64]
    changes += [{"warps": warps} for warps in (own.warps // 2, own.warps * 2)]
    changes += [{"stages": own.stages + 1}, {"keys": own.keys // 2, "stages": own.stages + 1}]
    changes += [{"keys": own.keys // 2}, {"keys": own.keys // 2, "warps": own.warps * 2}]
    changes += [{"rows": rows} for rows in (16, 64) if rows != own.rows]
    changes += [{"rows": 16, "splits": own.splits // 2}] if own.rows > 16 and own.splits > 1 else []
    return [dataclasses.replace(own, **change) for change in changes]


def attention_trials(case: attention_cases.Case, arguments: Time, batch: int) -> list[Trial]:
    """Reference and kernel over the caches of `LAYERS` layers."""
    lengths = (arguments.context,) * batch
    slots = case.S if case.ring else arguments.context + 528
    case = dataclasses.replace(case, lengths=lengths, S=slots)
    layers = [case.arguments("bfloat16", seed, 0.0) for seed in range(LAYERS)]
    q = layers[0][0]
    context = arguments.context if case.window is None else min(arguments.context, case.window)
    moved = 2 * 2 * batch * case.K * case.H * (context + case.T) + 2 * 2 * q.size
    trials = []
    runs = {"reference": functools.partial(block_attention, **case.options)}
    for tile in _attention_tiles(case, q, layers[0][1]) if arguments.tiles else [None]:
        name = "own choice" if tile is None else str(dataclasses.astuple(tile))
        runs[name] = functools.partial(case.kernel, tile=tile)
    for name, run in runs.items():

        def loop(steps: Any, q: Any, layers: Any, run: Any = run) -> Any:
            def body(_: Any, q: Any) -> Any:
                for _, *rest in layers:
                    q = run(q, *rest)
                return q

            return jax.lax.fori_loop(0, steps, body, q)

        described = {"batch": batch, "tile": name}
        trials.append(Trial(jax.jit(loop), (q, layers), described, moved))
    return trials


def _delta_runs(case: delta_cases.Case, batch: int, tiles: bool) -> dict[str, dict[str, Any]]:
    """Options of the kernel by description, its own choice first."""
    if case.T == 1:
        own = delta_gpu.own_token_tile(batch, case.value_heads, case.vd)
        others = ((case.vd, 8), (64, 8), (64, 4), (32, 8), (32, 4)) if tiles else ()
        return {str(tile): {"token_tile": tile} for tile in dict.fromkeys((own, *others))}
    own = delta_gpu.own_tile(batch, case.value_heads, case.vd)
    changes: list[dict[str, int]] = [{}]
    if tiles:
        changes += [{"columns": n, "warps": n // 16} for n in (16, 32, 64, 128) if n != own.columns]
        changes += [{"keys": 128}, {"keys": 32}, {"warps": own.warps * 2}]
        changes += [{"prepare_warps": warps} for warps in (2, 8)]
    made = [dataclasses.replace(own, **change) for change in changes]
    runs: dict[str, dict[str, Any]] = {str(tile): {"tile": tile} for tile in made}
    if tiles:
        runs["two parts"] = {"parts": 2}
    return runs


def heads_trials(case: heads_cases.Case, arguments: Time, batch: int) -> list[Trial]:
    """Reference and kernel behind the product that makes their input, as in a layer, which takes
    the most of the time; the caches of `LAYERS` layers."""
    case = dataclasses.replace(
        case, starts=(arguments.context,) * batch, counts=(case.T,) * batch,
        S=case.S if case.ring or not case.S else arguments.context + 528,
    )  # fmt: skip
    layers = [case.arguments("bfloat16", seed) for seed in range(LAYERS)]
    # As in a model all layers turn by the same angles.
    angles = layers[0]["angles"]
    sizes = [x.shape[-1] for x in (layers[0][name] for name in "qkv") if x is not None]
    width = case.N * case.H
    keys = jax.random.split(jax.random.key(arguments.context), LAYERS)
    weights = [
        jax.random.normal(key, (width, sum(sizes)), jnp.bfloat16) * width**-0.5 for key in keys
    ]
    x = jnp.ones((batch, case.T, width), jnp.bfloat16)
    # What is made of keys and values: caches, to be updated in place, or rows.
    rows = jnp.zeros((batch, case.T, case.K, case.H), jnp.bfloat16)
    made = [(layer["slots"].k, layer["slots"].v) if case.S else (rows, rows) for layer in layers]
    trials = []
    number = {
        kernels: parts_of_heads(batch * case.T, width, sum(sizes), case.H, jnp.bfloat16, kernels)
        for kernels in ("reference", "gpu")
    }
    for kernels in number:

        def loop(steps: Any, x: Any, made: Any, angles: Any, weights: Any, layers: Any,
                 kernels: Any = kernels) -> Any:  # fmt: skip
            def body(_: Any, carry: Any) -> Any:
                x, made = carry
                after = []
                for layer, weight, (k, v) in zip(layers, weights, made, strict=True):
                    product = in_parts(x.reshape(-1, width), weight, number[kernels])
                    parts = jnp.split(product, np.cumsum(sizes)[:-1], axis=-1)
                    given = layer | dict(zip("qkv", parts, strict=False), angles=angles)
                    if case.S:
                        given["slots"] = dataclasses.replace(given["slots"], k=k, v=v)
                    rows = attention_heads(**given, dtype=x.dtype, **case.options, kernels=kernels)
                    x = rows.q.reshape(x.shape)
                    if case.S:
                        k, v = rows.k_cache, rows.v_cache
                    elif case.K:
                        k, v = rows.k, rows.v
                    after.append((k, v))
                return x, after

            return jax.lax.fori_loop(0, steps, body, (x, made))

        described = {"batch": batch, "tile": kernels}
        moved = 2 * weights[0].size
        given = (x, made, angles, weights, layers)
        trials.append(Trial(jax.jit(loop), given, described, moved))
    return trials


def delta_trials(case: delta_cases.Case, arguments: Time, batch: int) -> list[Trial]:
    """Reference and kernels, the write of the ring among them."""
    kept = min(6, case.T)
    lengths, pending = (arguments.context,) * batch, (kept,) * batch
    case = dataclasses.replace(case, lengths=lengths, pending=pending, counts=None)
    layers = [case.arguments("bfloat16", seed) for seed in range(LAYERS)]
    state = layers[0][5]
    moved = 2 * state.nbytes + 2 * 4 * batch * case.T * case.value_heads * case.vd
    trials = []
    runs = {"reference": functools.partial(gated_delta_step, key_heads=case.key_heads)}
    for name, options in _delta_runs(case, batch, arguments.tiles).items():
        runs[name] = functools.partial(
            delta_gpu.gated_delta_step, key_heads=case.key_heads, **options
        )
    for name, run in runs.items():

        def loop(steps: Any, caches: Any, layers: Any, run: Any = run) -> Any:
            def body(_: Any, carry: Any) -> Any:
                caches, projected = carry
                new = []
                for (_, _, kernel, A_log, dt_bias, _, _, _, *counts), (ring, *rest) in zip(
                    layers, caches, strict=True
                ):
                    out, *rest, ring = run(ring, projected, kernel, A_log, dt_bias, *rest, *counts)
                    # The next layer waits for this one, as in a model.
                    projected = projected.at[:, 0, 0].add(
                        (1e-3 * out[:, 0, 0, 0]).astype(projected.dtype)
                    )
                    new.append((ring, *rest))
                return new, projected

            return jax.lax.fori_loop(0, steps, body, (caches, layers[0][1]))

        caches = [(layer[0], *layer[5:8]) for layer in layers]
        described = {"batch": batch, "tile": name}
        trials.append(Trial(jax.jit(loop), (caches, layers), described, moved))
    return trials
