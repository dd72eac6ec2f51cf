"""Reference mathematics of the gated delta rule, all in fp32 at the highest matmul precision.

Per value head the state `S` (key width x value width) follows, token by token,

    S <- exp(g) S;   d = beta (v - S^T k);   S <- S + k d^T;   out = S^T q

Axes: `kh` key heads, `vh` value heads (a multiple; consecutive value heads share a key head),
`kd` key width, `vd` value width. `g <= 0` is the log decay of a token, `G` its running sum inside
a block. Keys and queries arrive L2-normalised, queries also scaled.

In a layer they come out of a short causal convolution over `channels` (queries, keys and values
side by side). Its inputs stay in a ring: slot `p % slots` holds those of position `p`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# TF32, the default of fp32 products on recent GPUs, costs three digits of the state.
_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _per_value_head(x: Float[Array, "B T kh kd"], value_heads: int) -> Float[Array, "B vh T kd"]:
    return jnp.repeat(x.swapaxes(1, 2), value_heads // x.shape[2], axis=1)


def _decay(G: Float[Array, "B vh T"], mask: Array) -> Float[Array, "B vh T T"]:
    """exp(G_i - G_j) where `mask[i, j]`, else 0. Masked before exp: above the diagonal it grows."""
    difference = G[..., :, None] - G[..., None, :]
    return jnp.where(mask, jnp.exp(jnp.where(mask, difference, 0.0)), 0.0)


def _unit_lower_inverse(A: Float[Array, "*batch T T"]) -> Float[Array, "*batch T T"]:
    """(I + A)^-1 of a strictly lower triangular `A`, by doubling block sizes.

    A Neumann product would need as few steps, but loses four digits in fp32 on correlated keys.
    """
    T = A.shape[-1]
    row, column = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    inverse = jnp.broadcast_to(jnp.eye(T, dtype=A.dtype), A.shape)
    width = 1
    while width < T:
        below = ((row // width) % 2 == 1) & (column // width == row // width - 1)
        part = jnp.where(below, A, 0.0)
        if width > 1:
            part = _einsum("...ij,...jk,...kl->...il", inverse, part, inverse)
        inverse -= part
        width *= 2
    return inverse


def convolve(
    rows: Float[Array, "B R channels"], kernel: Float[Array, "taps channels"]
) -> Float[Array, "B T channels"]:
    """SiLU of the causal depthwise convolution, `R - taps + 1` rows, in the dtype of `rows`."""
    taps = kernel.shape[0]
    T = rows.shape[1] - taps + 1
    wide, kernel = rows.astype(jnp.float32), kernel.astype(jnp.float32)
    mixed = jnp.zeros((), jnp.float32)
    for tap in range(taps):
        mixed = mixed + wide[:, tap : tap + T] * kernel[tap]
    return jax.nn.silu(mixed).astype(rows.dtype)


def unit_heads(
    mixed: Float[Array, "B T width"], heads: int, scale: float = 1.0
) -> Float[Array, "B T heads per_head"]:
    """Heads of queries or keys, each L2-normalised and scaled, fp32."""
    x = mixed.astype(jnp.float32).reshape(*mixed.shape[:2], heads, -1)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def queries_keys_values(
    mixed: Float[Array, "B T channels"], key_heads: int, state: Float[Array, "B vh kd vd"]
) -> tuple[Float[Array, "B T kh kd"], Float[Array, "B T kh kd"], Float[Array, "B T vh vd"]]:
    """What the delta rule takes, from the output of `convolve`; `state` names the sizes."""
    value_heads, key_dim, value_dim = state.shape[1:]
    keys = key_heads * key_dim
    q = unit_heads(mixed[..., :keys], key_heads, key_dim**-0.5)
    k = unit_heads(mixed[..., keys : 2 * keys], key_heads)
    v = mixed[..., 2 * keys :].astype(jnp.float32)
    return q, k, v.reshape(*mixed.shape[:2], value_heads, value_dim)


def gates(
    a: Float[Array, "B T vh"],
    b: Float[Array, "B T vh"],
    A_log: Float[Array, " vh"],
    dt_bias: Float[Array, " vh"],
) -> tuple[Float[Array, "B T vh"], Float[Array, "B T vh"]]:
    """Log decay `g` and write strength `beta` from a layer's two projections, fp32."""
    dt = jax.nn.softplus(a.astype(jnp.float32) + dt_bias)
    return -jnp.exp(A_log) * dt, jax.nn.sigmoid(b.astype(jnp.float32))


def from_ring(
    ring: Float[Array, "B slots channels"], start: Int[Array, " B"], count: int
) -> Float[Array, "B count channels"]:
    """Rows at positions `start ..` of a ring; those before position 0 are zero."""
    position = start[:, None] + jnp.arange(count)
    rows = jnp.take_along_axis(ring, (position % ring.shape[1])[..., None], axis=1)
    return jnp.where((position >= 0)[..., None], rows, 0)


def to_ring(
    ring: Float[Array, "B slots channels"],
    new: Float[Array, "B T channels"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> Float[Array, "B slots channels"]:
    """Put the first `count` of `T` rows at positions `start ..`; of more than fit the last stay."""
    step, slots = jnp.arange(new.shape[1]), ring.shape[1]
    wanted = (step < count[:, None]) & (step >= count[:, None] - slots)
    slot = jnp.where(wanted, (start[:, None] + step) % slots, slots)
    return ring.at[jnp.arange(len(ring))[:, None], slot].set(new.astype(ring.dtype), mode="drop")


def fold_pending(
    ring: Float[Array, "B slots channels"],
    kernel: Float[Array, "taps channels"],
    state: Float[Array, "B vh kd vd"],
    update: Float[Array, "B vh T vd"],
    G: Float[Array, "B vh T"],
    length: Int[Array, " B"],
    pending: Int[Array, " B"],
    *,
    key_heads: int,
) -> Float[Array, "B vh kd vd"]:
    """`commit_gated_delta` of the last `pending` tokens before `length`, keys from the ring."""
    taps, key_dim = kernel.shape[0], state.shape[2]
    keys = slice(key_heads * key_dim, 2 * key_heads * key_dim)
    start = length - pending - (taps - 1)
    rows = from_ring(ring[..., keys], start, taps - 1 + update.shape[2])
    k = unit_heads(convolve(rows, kernel[:, keys]), key_heads)
    return commit_gated_delta(state, k, update, G, pending)


def gated_delta_step(
    ring: Float[Array, "B slots channels"],
    projected: Float[Array, "B T width"],
    kernel: Float[Array, "taps channels"],
    A_log: Float[Array, " vh"],
    dt_bias: Float[Array, " vh"],
    state: Float[Array, "B vh kd vd"],
    update: Float[Array, "B vh P vd"],
    G: Float[Array, "B vh P"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    pending: Int[Array, " B"],
    *,
    key_heads: int,
) -> tuple[Array, Array, Array, Array, Array]:
    """`pallas_kernels.gated_delta_step` in plain `jax.numpy`."""
    taps, room = kernel.shape[0], update.shape[2] - projected.shape[1]
    new = projected[..., : ring.shape[2]]
    b, a = jnp.split(projected[..., -2 * state.shape[1] :], 2, axis=-1)
    state = fold_pending(ring, kernel, state, update, G, length, pending, key_heads=key_heads)
    rows = jnp.concatenate([from_ring(ring, length - (taps - 1), taps - 1), new], axis=1)
    q, k, v = queries_keys_values(convolve(rows, kernel), key_heads, state)
    out, update, G = gated_delta_block(q, k, v, *gates(a, b, A_log, dt_bias), state)
    update = jnp.pad(update, ((0, 0), (0, 0), (0, room), (0, 0)))
    G = jnp.pad(G, ((0, 0), (0, 0), (0, room)))
    return out.astype(ring.dtype), state, update, G, to_ring(ring, new, length, count)


def gated_delta_block(
    q: Float[Array, "B T kh kd"],
    k: Float[Array, "B T kh kd"],
    v: Float[Array, "B T vh vd"],
    g: Float[Array, "B T vh"],
    beta: Float[Array, "B T vh"],
    state: Float[Array, "B vh kd vd"],
    ancestors: Bool[Array, "B T T"] | None = None,
) -> tuple[Float[Array, "B T vh vd"], Float[Array, "B vh T vd"], Float[Array, "B vh T"]]:
    """Run a whole block from `state`: outputs, update vectors `d`, running log decay `G`.

    The update vectors are causal: those of accepted tokens do not depend on rejected ones, which
    is why `commit_gated_delta` needs no second solve. In a tree the same sums run over a node and
    its `ancestors` in place of all tokens up to it; decay runs along each branch.
    """
    T, value_heads = v.shape[1], v.shape[2]
    q, k = _per_value_head(q, value_heads), _per_value_head(k, value_heads)
    v, beta = v.swapaxes(1, 2), beta.swapaxes(1, 2)
    g = g.swapaxes(1, 2)
    row, column = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    if ancestors is None:
        G, sees = jnp.cumsum(g, axis=-1), column <= row
    else:
        G, sees = _einsum("Bij,BHj->BHi", ancestors.astype(g.dtype), g), ancestors[:, None]
    through = _decay(G, sees)

    grown = jnp.exp(G)[..., None]
    A = jnp.where(column < row, beta[..., None] * through * _einsum("BHik,BHjk->BHij", k, k), 0.0)
    residual = beta[..., None] * (v - grown * _einsum("BHtk,BHkv->BHtv", k, state))
    update = _einsum("BHij,BHjv->BHiv", _unit_lower_inverse(A), residual)
    out = grown * _einsum("BHtk,BHkv->BHtv", q, state)
    out += _einsum("BHij,BHjv->BHiv", through * _einsum("BHik,BHjk->BHij", q, k), update)
    return out.swapaxes(1, 2), update, G


def commit_gated_delta(
    state: Float[Array, "B vh kd vd"],
    k: Float[Array, "B T kh kd"],
    update: Float[Array, "B vh T vd"],
    G: Float[Array, "B vh T"],
    keep: Int[Array, " B"],
) -> Float[Array, "B vh kd vd"]:
    """The state after the first `keep` tokens of a block (0 leaves it as it is).

    `state` is the state before the block; the rest are the block's records from
    `gated_delta_block`.
    """
    kept = jnp.arange(G.shape[-1]) < keep[:, None, None]
    last = jnp.take_along_axis(G, jnp.maximum(keep - 1, 0)[:, None, None], axis=-1)
    last = jnp.where(keep[:, None, None] > 0, last, 0.0)
    weight = jnp.where(kept, jnp.exp(jnp.where(kept, last - G, 0.0)), 0.0)
    k = _per_value_head(k, G.shape[1])
    grown = jnp.exp(last)[..., None] * state
    return grown + _einsum("BHtk,BHtv->BHkv", k * weight[..., None], update)


def gated_delta_chunked(
    q: Float[Array, "B T kh kd"],
    k: Float[Array, "B T kh kd"],
    v: Float[Array, "B T vh vd"],
    g: Float[Array, "B T vh"],
    beta: Float[Array, "B T vh"],
    state: Float[Array, "B vh kd vd"],
    *,
    chunk: int = 64,
) -> tuple[Float[Array, "B T vh vd"], Float[Array, "B vh kd vd"]]:
    """Run many tokens in chunks: outputs and the state after all of them.

    A token with `g = 0` and `beta = 0` leaves the state untouched, so padding is masked there.
    `T` that is no multiple of `chunk` is padded in this way.
    """
    B, T = v.shape[:2]
    chunk = min(chunk, T)
    pieces = -(-T // chunk)

    def split(x: Array) -> Array:
        pad = [(0, 0), (0, pieces * chunk - T)] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, pad).reshape(B, pieces, chunk, *x.shape[2:]).swapaxes(0, 1)

    def one(state: Array, part: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = part
        out, update, G = gated_delta_block(q, k, v, g, beta, state)
        keep = jnp.full((B,), chunk, jnp.int32)
        return commit_gated_delta(state, k, update, G, keep), out

    state, out = lax.scan(one, state, tuple(split(x) for x in (q, k, v, g, beta)))
    return out.swapaxes(0, 1).reshape(B, pieces * chunk, *v.shape[2:])[:, :T], state


def gated_delta_sequential(
    q: Float[Array, "B T kh kd"],
    k: Float[Array, "B T kh kd"],
    v: Float[Array, "B T vh vd"],
    g: Float[Array, "B T vh"],
    beta: Float[Array, "B T vh"],
    state: Float[Array, "B vh kd vd"],
) -> tuple[Float[Array, "B T vh vd"], Float[Array, "B vh kd vd"]]:
    """The recurrence as written, one token at a time: the yardstick of the other forms."""
    value_heads = v.shape[2]

    def one(state: Array, token: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, g, beta = token
        state = jnp.exp(g)[..., None, None] * state
        d = beta[..., None] * (v - _einsum("BHk,BHkv->BHv", k, state))
        state = state + k[..., :, None] * d[..., None, :]
        return state, _einsum("BHk,BHkv->BHv", q, state)

    def over_time(x: Array) -> Array:
        return jnp.moveaxis(x, 1, 0)

    q, k = (_per_value_head(x, value_heads).swapaxes(1, 2) for x in (q, k))
    state, out = jax.lax.scan(one, state, tuple(over_time(x) for x in (q, k, v, g, beta)))
    return jnp.moveaxis(out, 0, 1), state
