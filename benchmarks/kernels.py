"""Kernels on a card: equal to the reference, and how long each takes beside it.

    python -m benchmarks.kernels parity
    python -m benchmarks.kernels time --batches 1 8 32 --context 1024 --report kernels.json

`parity` compares on fresh random inputs whose unused cache slots are NaN, as is the memory that
results are given. `time` runs each kernel inside one compiled loop over the caches of several
layers, as decoding does, so that a cache comes from memory and not from the chip
(`benchmarks/kernel_trials.py`). Sizes are those of the published models.
"""

import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.kernel_trials import (
    LAYERS,
    Time,
    Trial,
    attention_trials,
    delta_trials,
    heads_trials,
)
from benchmarks.product_trials import likeliest_trials, product_trials
from pallas_kernels import (
    attention_heads,
    block_attention,
    gated_delta_step,
    hopper,
    residual_norm,
)
from pallas_kernels.attention_heads import cases as heads_cases
from pallas_kernels.block_attention import cases as attention_cases
from pallas_kernels.gated_delta import cases as delta_cases
from pallas_kernels.likeliest import cases as likeliest_cases
from pallas_kernels.likeliest import gpu as likeliest_gpu
from pallas_kernels.likeliest import streamed
from pallas_kernels.parts import product_parts
from pallas_kernels.product import logits
from pallas_kernels.residual_norm import cases as norm_cases

ALLOWED = {"bfloat16": 1e-2, "float32": 1e-5}


@dataclass(frozen=True)
class Parity:
    """Compare every kernel with its reference."""

    seed: int = 0
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16", "float32")


def _error(got: Any, wanted: Any) -> float:
    """Largest difference as a share of the largest magnitude; infinite if one is not finite."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def _error_of_cache(got: Any, wanted: Any) -> float:
    """The same for a cache, which must be NaN in the same places."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if (np.isnan(got) != np.isnan(wanted)).any():
        return float("inf")
    return _error(np.nan_to_num(got), np.nan_to_num(wanted))


def _poison(results: Any) -> None:
    """Fill memory of the sizes of `results` with NaN and give it back: the next results lie there,
    and what a kernel forgets to write shows."""
    jax.block_until_ready([jnp.full(x.shape, np.nan, x.dtype) for x in jax.tree.leaves(results)])


def parity(arguments: Parity) -> bool:
    """True if every kernel is within its tolerance."""
    good = True
    for dtype in arguments.dtypes:
        allowed = ALLOWED[dtype]
        for case in heads_cases.SERVED:
            heads = functools.partial(attention_heads, dtype=jnp.dtype(dtype), **case.options)
            inputs = case.arguments(dtype, arguments.seed)
            # XLA would skip roundings between operations that it joins.
            exact = jax.jit(heads, compiler_options={"xla_allow_excess_precision": False})
            wanted = exact(**inputs)
            _poison(wanted)
            got = jax.jit(functools.partial(heads, kernels="gpu"))(**inputs)
            errors = {
                name: _error_of_cache(ours, theirs) if "cache" in name else _error(ours, theirs)
                for name, ours, theirs in zip(wanted._fields, got, wanted, strict=True)
                if theirs is not None
            }
            good &= _say(f"heads_{case.name}", dtype, errors, allowed)
        for case in attention_cases.SERVED:
            run = functools.partial(block_attention, **case.options)
            got = jax.jit(functools.partial(run, kernels="gpu"))(
                *case.arguments(dtype, arguments.seed, np.nan)
            )
            given = case.arguments(dtype, arguments.seed, 0.0)
            exact = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in given]
            good &= _say(case.name, dtype, {"outputs": _error(got, jax.jit(run)(*exact))}, allowed)
            if case.each > 1:
                errors = _gradient_errors(run, given, exact)
                good &= _say(f"{case.name}_gradient", dtype, errors, allowed)
        for case in delta_cases.SERVED:
            step = functools.partial(gated_delta_step, key_heads=case.key_heads)
            got = jax.jit(functools.partial(step, kernels="gpu"))(
                *case.arguments(dtype, arguments.seed, np.nan)
            )
            wanted = jax.jit(step)(*case.arguments(dtype, arguments.seed, 0.0))
            names = ("outputs", "state", "updates", "decay")
            errors = {n: _error(a, b) for n, a, b in zip(names, got, wanted, strict=False)}
            # Slots that are not written stay NaN.
            ring = np.asarray(got[-1], np.float32)
            written = ~np.isnan(ring)
            errors["ring"] = _error(ring[written], np.asarray(wanted[-1], np.float32)[written])
            missing = ~written & (np.asarray(wanted[-1], np.float32) != 0)
            errors["ring"] = float("inf") if missing.any() else errors["ring"]
            good &= _say(case.name, dtype, errors, allowed)
        for case in norm_cases.SERVED:
            inputs, options = case.arguments(dtype, arguments.seed)
            run = jax.jit(residual_norm, static_argnames="kernels")
            got, wanted = (run(*inputs, **options, kernels=k) for k in ("gpu", "reference"))
            pairs = zip(("stream", "norm"), got, wanted, strict=True)
            good &= _say(case.name, dtype, {n: _error(a, b) for n, a, b in pairs}, allowed)
        for case in norm_cases.PRODUCTS:
            number = hopper.number_of_parts(case.width_in, case.width_out)
            rows = hopper.HELD
            if hopper.takes(rows, case.width_in, case.width_out, dtype):
                _, x, ((matrix, _),) = case.arguments(dtype, rows, 1)
                run = jax.jit(product_parts, static_argnums=(2, 3))
                wanted = run(x, matrix, number, "reference")
                _poison(wanted)
                errors = {"parts": _error(run(x, matrix, number, "gpu"), wanted)}
                good &= _say(f"streamed_{case.name}_{rows}", dtype, errors, ALLOWED["float32"])
        for case in likeliest_cases.SERVED:
            x, table = case.arguments(dtype, arguments.seed)
            made = jax.jit(logits)(x, table)[:, : case.vocabulary]
            kinds: dict[str, tuple[Any, Any]] = {
                "likeliest": (likeliest_gpu, likeliest_gpu.own_tile(len(x), case.width, dtype))
            }
            if streamed.takes(len(x), case.tokens, case.width, dtype):
                kinds["streamed"] = (streamed, streamed.own_tile(len(x), case.tokens))
            for name, (kernel, tile) in kinds.items():
                width = getattr(tile, "tokens", None) or tile.columns
                partial = jax.ShapeDtypeStruct((-(-case.tokens // width), len(x)), jnp.float32)
                _poison([partial, partial])
                run = functools.partial(kernel.likeliest, vocabulary=case.vocabulary, tile=tile)
                ids = jax.jit(run)(x, table)
                # Another order of sums may choose another token: how far is it from the best?
                own = jnp.take_along_axis(made, ids[:, None], axis=1)[:, 0]
                errors = {"short of the best": _error(own, made.max(-1))}
                if case.twice and (ids >= case.tokens // 2).any():
                    errors["the second of equals"] = float("inf")
                # Sums are fp32 in both.
                good &= _say(f"{name}_{case.name}", dtype, errors, ALLOWED["float32"])
    return good


def _gradient_errors(
    run: Callable[..., Any], given: Sequence[Any], exact: Sequence[Any]
) -> dict[str, float]:
    """Of the gradients of a sum of squares: the kernel's of `given` arguments against the
    reference's of `exact` ones."""

    def gradients(arguments: Sequence[Any], **options: Any) -> tuple[Any, ...]:
        def loss(*sides: Any) -> Any:
            return jnp.square(run(*sides, arguments[-1], **options).astype(jnp.float32)).sum()

        return jax.jit(jax.grad(loss, argnums=tuple(range(5))))(*arguments[:-1])

    names = ("q", "k_context", "v_context", "k", "v")
    pairs = zip(names, gradients(given, kernels="gpu"), gradients(exact), strict=True)
    return {name: _error(ours, theirs) for name, ours, theirs in pairs}


def _say(name: str, dtype: str, errors: dict[str, float], allowed: float) -> bool:
    good = max(errors.values()) <= allowed
    rounded = {key: f"{value:.1e}" for key, value in errors.items()}
    print(json.dumps({"parity": name, "dtype": dtype, **rounded, "good": good}), flush=True)
    return good


def _compile(trial: Trial) -> Callable[..., Any] | str:
    try:
        return trial.compiled.lower(np.int32(1), *trial.arguments).compile()  # type: ignore[attr-defined]
    except Exception as error:
        return str(error).splitlines()[0][:200]


def _microseconds(compiled: Callable[..., Any], trial: Trial) -> float:
    """Of one operation: the difference between a long and a short loop, median of five."""

    def seconds(steps: int) -> float:
        began = time.perf_counter()
        jax.block_until_ready(compiled(np.int32(steps), *trial.arguments))
        return time.perf_counter() - began

    few, many = 4, 4 + max(8, 400 // LAYERS)
    seconds(few)
    gained = [seconds(many) - seconds(few) for _ in range(5)]
    return 1e6 * float(np.median(gained)) / (many - few) / LAYERS


def measure(arguments: Time) -> list[dict[str, Any]]:
    records = []
    # What their names begin with, since cases of several kernels are called after one model.
    makers: list[tuple[str, Sequence[Any], Any]] = [
        ("heads_", heads_cases.SERVED, heads_trials),
        ("", attention_cases.SERVED, attention_trials),
        ("", delta_cases.SERVED, delta_trials),
        ("", norm_cases.PRODUCTS, product_trials),
        ("likeliest_", likeliest_cases.TIMED, likeliest_trials),
    ]
    for batch in arguments.batches:
        for begins, cases, make in makers:
            for case in cases:
                name = begins + case.name
                untimed = ("prefill", "like_keys", "context", "training")
                if arguments.only not in name or any(part in name for part in untimed):
                    continue
                trials = make(case, arguments, batch)
                with ThreadPoolExecutor(8) as pool:
                    compiled = list(pool.map(_compile, trials))
                for trial, program in zip(trials, compiled, strict=True):
                    record = {"case": name, **trial.described}
                    if isinstance(program, str):
                        record["failed"] = program
                    else:
                        taken = _microseconds(program, trial)
                        record["us"] = round(taken, 2)
                        record["TB_s"] = round(trial.bytes_moved / taken / 1e6, 2)
                    records.append(record)
                    print(json.dumps(record), flush=True)
                    if arguments.report:
                        arguments.report.write_text(json.dumps(records, indent=1) + "\n")
    if not records:
        raise SystemExit(f"--only {arguments.only!r} is part of no case's name")
    return records


def main() -> int:
    commands: Any = Parity | Time
    arguments = tyro.cli(commands, description=__doc__)
    if isinstance(arguments, Parity):
        return 0 if parity(arguments) else 1
    measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
