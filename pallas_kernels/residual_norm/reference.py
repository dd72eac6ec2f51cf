"""What lies between two products of a transformer layer, in plain `jax.numpy`."""

from jaxtyping import Array, Float

from pallas_kernels.norm import Norm, rms_norm
from pallas_kernels.parts import whole


def residual_norm(
    x: Float[Array, "R D"],
    parts: Float[Array, "S P D"],
    norm: Norm | None,
    *,
    post: Norm | None = None,
    factor: Float[Array, " 1"] | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "R D"]]:
    """`pallas_kernels.residual_norm`."""
    out = whole(parts, len(x), x.dtype)
    x = x + (out if post is None else rms_norm(out, post))
    if factor is not None:
        x = x * factor
    return x, x if norm is None else rms_norm(x, norm)
