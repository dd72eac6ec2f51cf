"""The kernel of attention heads, interpreted, against norm, rotation and cache write of layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmflash_jax.layers.cache import may_write_first
from pallas_kernels import KernelError, attention_heads, block_attention, choose, write_rows
from pallas_kernels.attention_heads import splits
from pallas_kernels.attention_heads.cases import SMALL
from tests.tolerances import HEADS, assert_close

CASES = {case.name: case for case in SMALL}
# Every rounding that is written takes place: XLA would skip some between operations that it joins.
exact_jit = functools.partial(
    jax.jit,
    compiler_options={"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False},
)


def run(case, dtype, kernels):
    heads = functools.partial(attention_heads, dtype=dtype, **case.options, kernels=kernels)
    return exact_jit(heads)(**case.arguments(dtype, len(case.name)))


def both(case, dtype):
    """Pairs of what kernel and reference give, by name, in fp32; unwritten outputs are NaN."""
    got, wanted = (run(case, dtype, kernels) for kernels in ("interpret", "reference"))
    pairs = {}
    for name, theirs in wanted._asdict().items():
        ours = getattr(got, name)
        assert (ours is None) == (theirs is None), name
        if theirs is not None:
            assert ours.dtype == theirs.dtype
            pairs[name] = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    return pairs


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference_bit_for_bit_in_bf16(name):
    for what, (got, wanted) in both(CASES[name], jnp.bfloat16).items():
        np.testing.assert_array_equal(got, wanted, what)


@pytest.mark.parametrize("name", ["qwen35", "gemma", "context", "wide"])
def test_kernel_equals_reference_in_fp32(name):
    for what, (got, wanted) in both(CASES[name], jnp.float32).items():
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), what)
        assert_close(np.nan_to_num(got), np.nan_to_num(wanted), HEADS, what)


def test_a_cache_keeps_what_it_is_not_given():
    """Rows past the count, other slots and slots past the end, by the reference's own rule."""
    case = CASES["qwen35"]
    given = case.arguments(jnp.float32, len(case.name))
    got = run(case, jnp.float32, "interpret")
    caches = (given["slots"].k, got.k_cache), (given["slots"].v, got.v_cache)
    for before, after in caches:
        changed = (np.nan_to_num(before) != np.nan_to_num(after)).any((1, 3))
        wanted = np.zeros_like(changed)
        for row, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
            wanted[row, start : start + count] = True
        assert wanted.sum() == 16 + 7 + 8, "the last row ends behind the cache"
        np.testing.assert_array_equal(changed, wanted)


def test_what_cannot_be_done_is_said():
    case = CASES["draft"]
    given: dict[str, Any] = case.arguments(jnp.float32, 0) | {"dtype": jnp.float32}
    with pytest.raises(KernelError, match="cpu"):
        attention_heads(**given, **case.options, kernels="gpu")
    narrow: dict[str, Any] = given | {"q_norm": None, "k_norm": None}
    with pytest.raises(KernelError, match="width 24"):
        attention_heads(**narrow, head_dim=24, kernels="interpret")
    mixed: dict[str, Any] = CASES["qwen35"].arguments(jnp.float32, 0) | {"dtype": jnp.bfloat16}
    with pytest.raises(KernelError, match="bfloat16, their cache is float32"):
        attention_heads(**mixed, **CASES["qwen35"].options, kernels="interpret")
    nowhere: dict[str, Any] = given | {
        "k": None,
        "v": None,
        "slots": CASES["context"].arguments("float32", 0)["slots"],
    }
    with pytest.raises(ValueError, match="to write"):
        attention_heads(**nowhere, **case.options)
    with pytest.raises(ValueError, match="16 rows is short of the 32 needed"):
        attention_heads(**(given | {name: given[name][:, :16] for name in "qkv"}), **case.options)
    with pytest.raises(ValueError, match="need queries"):
        attention_heads(**(given | {"v": None}), **case.options)


def test_only_few_rows_are_wanted_in_parts(monkeypatch):
    monkeypatch.setattr(choose, "platform", lambda: "gpu")
    wanted = [(1, 3072, 8), (32, 6144, 4), (16, 10240, 2), (33, 3072, 1)]
    for rows, columns, number in wanted:
        assert splits(rows, 2560, columns, 256, jnp.bfloat16, "auto") == number
    assert splits(16, 2560, 3072, 256, jnp.bfloat16, "reference") == 1


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_block_may_enter_a_ring_before_it_is_read_exactly_where_may_write_first(tokens):
    """With one slot fewer than that the oldest key of the first query is lost."""
    window, length = 7, jnp.asarray([40, 3])
    rng = np.random.default_rng(0)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    for slots in (window - 1 + tokens, window - 2 + tokens):
        old, q = jnp.asarray(normal((2, 2, 1, slots, 16))), jnp.asarray(normal((2, tokens, 2, 16)))
        rows = jnp.asarray(normal((2, 2, tokens, 1, 16)))
        new = [
            write_rows(cache, row, length, jnp.full((2,), tokens), ring=True)
            for cache, row in zip(old, rows, strict=True)
        ]
        attend = functools.partial(
            block_attention, k_block=rows[0], v_block=rows[1], length=length, scale=0.3,
            causal=True, window=window, ring=True,
        )  # fmt: skip
        before, after = attend(q, *old), attend(q, *new)
        assert may_write_first(slots, tokens, window) == bool((before == after).all())
    assert may_write_first(0, tokens, None)
