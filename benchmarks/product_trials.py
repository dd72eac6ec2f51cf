"""What is timed of products and what follows them: loops over layers, by XLA and by kernels."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_trials import LAYERS, Time, Trial, in_parts
from pallas_kernels import hopper, likeliest, residual_norm
from pallas_kernels.likeliest import cases as likeliest_cases
from pallas_kernels.likeliest import gpu as likeliest_gpu
from pallas_kernels.likeliest import streamed
from pallas_kernels.parts import number_of_parts
from pallas_kernels.product import logits
from pallas_kernels.residual_norm import cases as norm_cases


def product_trials(case: norm_cases.Product, arguments: Time, batch: int) -> list[Trial]:
    """A product, the residual and the norm, as XLA makes them and with the kernel: only their sum
    counts, since XLA adds up a product's splits inside the addition. Rows of plain decoding and of
    blocks of 16; the products of `LAYERS` layers."""
    trials = []
    for rows in (batch, 16 * batch):
        x, inputs, layers = case.arguments("bfloat16", rows, LAYERS)
        own = number_of_parts(rows, case.width_in, case.width_out)
        tried = sorted({1, 2, 4, 8, 16} if arguments.tiles else {own})
        makers: dict[str, Any] = {"reference": functools.partial(in_parts, number=0)}
        for splits in (s for s in tried if case.width_in % (16 * s) == 0):
            makers[f"{splits} splits"] = functools.partial(in_parts, number=splits)
        if hopper.takes(rows, case.width_in, case.width_out, jnp.bfloat16):
            makers |= _streamed(rows, case.width_in, case.width_out, arguments.tiles)
        for name, make in makers.items():
            kernels = "reference" if name == "reference" else "gpu"

            def add(
                x: Any,
                inputs: Any,
                matrix: Any,
                norms: Any,
                make: Any = make,
                kernels: Any = kernels,
            ) -> Any:
                norm, post = norms
                return residual_norm(x, make(inputs, matrix), norm, post=post, kernels=kernels)

            def loop(steps: Any, x: Any, inputs: Any, layers: Any, add: Any = add) -> Any:
                def body(_: Any, carry: Any) -> Any:
                    x, normed = carry
                    for layer in layers:
                        # The next product waits for this norm, as in a model.
                        x, normed = add(x, inputs * normed[:, :1], *layer)
                    return x, normed

                return jax.lax.fori_loop(0, steps, body, (x, x))

            described = {"rows": rows, "tile": name, "parts by XLA": own}
            moved = layers[0][0].nbytes + inputs.nbytes + 3 * x.nbytes
            trials.append(Trial(jax.jit(loop), (x, inputs, layers), described, moved))
    return trials


def _streamed(rows: int, width_in: int, width_out: int, tiles: bool) -> dict[str, Any]:
    """Makers of the parts of a product by description, the kernel's own choice first."""
    own = hopper.own_tile(rows, width_out, jnp.float32)
    number = hopper.number_of_parts(width_in, width_out)
    tried = [(own, number)]
    if tiles:
        tried += [
            (dataclasses.replace(own, cluster=1), number),
            (own, number // 2),
            (own, 2 * number),
        ]
        narrow = dataclasses.replace(own, columns=64, steps=8)
        tried += [(narrow, number), (narrow, number // 2)]
    return {
        f"streamed, {parts} parts, {dataclasses.astuple(tile)}": functools.partial(
            hopper.product_parts, parts=parts, tile=tile
        )
        for tile, parts in tried
        if parts and width_in % (parts * hopper.INNER) == 0
    }


def _in_chunks(x: Any, table: Any, chunks: int) -> Any:
    """The most likely tokens by XLA, some of the table after the other: logits of a chunk may stay
    on the chip until they are compared."""
    size = -(-len(table) // chunks)
    best, ids = jnp.full(len(x), -jnp.inf), jnp.zeros(len(x), jnp.int32)
    for start in range(0, len(table), size):
        made = logits(x, table[start : start + size])
        better = made.max(-1) > best
        ids = jnp.where(better, made.argmax(-1).astype(jnp.int32) + start, ids)
        best = jnp.maximum(best, made.max(-1))
    return ids


def likeliest_trials(case: likeliest_cases.Case, arguments: Time, batch: int) -> list[Trial]:
    """The head and the most likely tokens of blocks of 16: by XLA whole and in chunks, and by the
    kernel."""
    rows, trials = 16 * batch, []
    x, table = dataclasses.replace(case, rows=rows).arguments(jnp.bfloat16, 0)
    runs: dict[str, Any] = {"reference": likeliest}
    own = likeliest_gpu.own_tile(rows, case.width, jnp.bfloat16)
    changes: list[dict[str, int]] = [{}]
    if arguments.tiles:
        runs |= {f"{n} chunks": functools.partial(_in_chunks, chunks=n) for n in (4, 16)}
        changes += [{"tokens": 64}, {"tokens": 256, "warps": 8, "stages": 3}, {"warps": 8}]
        changes += [{"inner": 128, "stages": 3}, {"stages": 3}]
    if streamed.takes(rows, case.tokens, case.width, jnp.bfloat16):
        wide = streamed.own_tile(rows, case.tokens)
        narrow = dataclasses.replace(wide, columns=128, steps=5)
        for tile in (wide, narrow) if arguments.tiles else (wide,):
            runs[f"streamed, {dataclasses.astuple(tile)}"] = functools.partial(
                streamed.likeliest, vocabulary=None, tile=tile
            )
    for change in changes:
        tile = dataclasses.replace(own, **change)
        runs[str(dataclasses.astuple(tile))] = functools.partial(
            likeliest_gpu.likeliest, vocabulary=None, tile=tile
        )
    for name, run in runs.items():

        def loop(steps: Any, x: Any, table: Any, run: Any = run) -> Any:
            def body(_: Any, x: Any) -> Any:
                for _ in range(LAYERS):
                    # The next rows wait for these tokens.
                    x = x.at[:, 0].set(run(x, table).astype(x.dtype))
                return x

            return jax.lax.fori_loop(0, steps, body, x)

        described = {"rows": rows, "tile": name}
        trials.append(Trial(jax.jit(loop), (x, table), described, table.nbytes))
    return trials
