"""Small layers against their torch and transformers counterparts, fp32."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import Qwen3_5TextConfig, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5

from mmflash_jax.layers.linear import Embedding, linear
from mmflash_jax.layers.mlp import GeGLU, SwiGLU
from mmflash_jax.layers.norm import (
    GatedRMSNorm,
    LayerNorm,
    RMSNorm,
    ZeroCentredRMSNorm,
)
from mmflash_jax.layers.rotary import mrope_angles, rotary_angles
from mmflash_jax.layers.schema import abstract_module, initialise, leaves_with_path, set_leaf
from pallas_kernels import apply_rotary, write_rows
from pallas_kernels.gated_delta.reference import unit_heads
from tests.tolerances import KERNEL_BF16, LAYER, assert_close

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def given(module, **values):
    """The module with its parameters set, `name` or `name__sub`."""
    structure, state = nnx.split(module)
    params = nnx.to_pure_dict(state)
    for name, value in values.items():
        set_leaf(params, tuple(name.split("__")), jnp.asarray(value))
    return nnx.merge(structure, params)


def on_torch(module, *inputs, **parameters):
    """Output of a torch module with its parameters set."""
    with torch.no_grad():
        for name, value in parameters.items():
            dict(module.named_parameters())[name].copy_(torch.from_numpy(value))
        return module(*(torch.from_numpy(x) for x in inputs)).numpy()


@pytest.mark.parametrize("size", [1.0, 1e-4, 1e4])
def test_norms(size):
    """Small inputs too: there eps decides."""
    x, weight, bias, gate = size * normal(2, 5, 24), normal(24), normal(24), normal(2, 5, 24)
    options = {"eps": 1e-6, "dtype": jnp.dtype("float32")}
    pairs = [
        (RMSNorm(24, **options), modeling_qwen3.Qwen3RMSNorm(24, eps=1e-6), {}),
        (ZeroCentredRMSNorm(24, **options), modeling_qwen3_5.Qwen3_5RMSNorm(24, eps=1e-6), {}),
        (LayerNorm(24, **options), torch.nn.LayerNorm(24, eps=1e-6), {"bias": bias}),
    ]
    for ours, theirs, more in pairs:
        got = given(ours, weight=weight, **more)(jnp.asarray(x))
        wanted = on_torch(theirs, x, weight=weight, **more)
        assert_close(got, wanted, LAYER, type(ours).__name__)
    got = given(GatedRMSNorm(24, eps=1e-6), weight=weight)(jnp.asarray(x), jnp.asarray(gate))
    theirs = modeling_qwen3_5.Qwen3_5RMSNormGated(24, eps=1e-6)
    assert_close(got, on_torch(theirs, x, gate, weight=weight), LAYER, "gated")
    wanted = modeling_qwen3_5.l2norm(torch.from_numpy(x)).numpy()
    assert_close(unit_heads(jnp.asarray(x), 1)[:, :, 0], wanted, LAYER, "l2")


def test_norms_round_where_transformers_rounds():
    """bfloat16 in, bfloat16 out, bit for bit but for a rare last-place difference."""
    x, weight = normal(4, 64), normal(64)
    narrow = torch.from_numpy(x).bfloat16()
    for ours, theirs in (
        (RMSNorm, modeling_qwen3.Qwen3RMSNorm),
        (ZeroCentredRMSNorm, modeling_qwen3_5.Qwen3_5RMSNorm),
    ):
        reference = theirs(64, eps=1e-6).bfloat16()
        with torch.no_grad():
            reference.weight.copy_(torch.from_numpy(weight))
            wanted = reference(narrow).float().numpy()
        module = ours(64, eps=1e-6, dtype=jnp.dtype("bfloat16"))
        module = given(module, weight=jnp.asarray(weight, jnp.bfloat16))
        got = module(jnp.asarray(x, jnp.bfloat16))
        assert got.dtype == jnp.bfloat16
        same = np.asarray(got, np.float32) == wanted
        assert same.mean() > 0.98
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=2**-6)


def test_swiglu():
    x, gate, up, down = normal(3, 16), normal(40, 16), normal(40, 16), normal(16, 40)
    ours = SwiGLU(16, 40, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    joined = np.concatenate([gate, up]).T
    ours = given(ours, gate_up_proj__kernel=joined, down_proj__kernel=down.T)
    config = Qwen3Config(hidden_size=16, intermediate_size=40)
    weights = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
    wanted = on_torch(modeling_qwen3.Qwen3MLP(config), x, **weights)
    assert_close(ours(jnp.asarray(x)), wanted, LAYER)


def test_plain_rotary_turns_whole_heads():
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = Qwen3Config(head_dim=16, hidden_size=64, rope_parameters=rope)
    x, position = normal(2, 7, 4, 16), np.array([[0, 1, 2, 3, 40, 41, 400], [5] * 7])
    cosine, sine = modeling_qwen3.Qwen3RotaryEmbedding(config)(
        torch.from_numpy(x), torch.from_numpy(position)
    )
    wanted, _ = modeling_qwen3.apply_rotary_pos_emb(
        torch.from_numpy(x), torch.from_numpy(x), cosine, sine, unsqueeze_dim=2
    )
    got = apply_rotary(jnp.asarray(x), rotary_angles(jnp.asarray(position), 1e4, 16))
    assert_close(got, wanted.numpy(), LAYER)


@pytest.mark.parametrize("section", [(3, 3, 2), (4, 2, 2), (2, 3, 3)])
def test_interleaved_mrope_turns_part_of_the_head(section):
    """Axes interleaved over the frequencies; dimensions past the rotary width pass through."""
    config = Qwen3_5TextConfig(
        head_dim=64,
        hidden_size=256,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": list(section),
            "mrope_interleaved": True,
        },
    )
    x, position = normal(2, 7, 4, 64), RNG.integers(0, 500, (3, 2, 7))
    cosine, sine = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(config)(
        torch.from_numpy(x), torch.from_numpy(position)
    )
    wanted, _ = modeling_qwen3_5.apply_rotary_pos_emb(
        torch.from_numpy(x), torch.from_numpy(x), cosine, sine, unsqueeze_dim=2
    )
    got = apply_rotary(jnp.asarray(x), mrope_angles(jnp.asarray(position), 1e7, 16, section))
    assert_close(got, wanted.numpy(), LAYER)
    np.testing.assert_array_equal(got[..., 16:], x[..., 16:])


def test_equal_axes_give_ordinary_rotary():
    position = np.arange(9)[None]
    three = mrope_angles(jnp.asarray(np.stack([position] * 3)), 1e4, 16, (3, 3, 2))
    np.testing.assert_array_equal(three, rotary_angles(jnp.asarray(position), 1e4, 16))


def test_rows_past_the_count_or_the_end_are_dropped():
    cache, rows = normal(4, 2, 6, 3), normal(4, 5, 2, 3)
    start, count = np.array([0, 4, 2, 6]), np.array([5, 5, 0, 3])
    got = jax.jit(write_rows)(cache, rows, start, count)
    wanted = cache.copy()
    wanted[0, :, :5] = rows[0].swapaxes(0, 1)
    wanted[1, :, 4:] = rows[1, :2].swapaxes(0, 1)
    np.testing.assert_array_equal(got, wanted)


def test_products_of_narrow_tables_accumulate_wide():
    """Logits are fp32, whatever the dtype of the table."""
    for dtype in ("float32", "bfloat16"):
        module = Embedding(11, 8, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
        hidden = jnp.asarray(normal(3, 8), dtype)
        logits = module.attend(hidden)
        assert logits.dtype == jnp.float32
        table = np.asarray(module.embedding[...], np.float64)
        assert_close(logits, np.asarray(hidden, np.float64) @ table.T, LAYER, dtype)


def test_schema_is_a_plain_dict_of_shapes():
    def build(rngs):
        return SwiGLU(4, 6, dtype=jnp.dtype("float32"), rngs=rngs)

    structure, abstract = abstract_module(build)
    hash(structure)
    params = initialise(build, 0)
    shapes = {path: leaf.shape for path, leaf in leaves_with_path(abstract)}
    assert shapes[("down_proj", "kernel")] == (6, 4)
    assert shapes == {path: leaf.shape for path, leaf in leaves_with_path(params)}
    assert nnx.merge(structure, params)(jnp.ones((2, 4))).shape == (2, 4)


def test_linear_is_fp32_exact_on_every_backend():
    """Recent GPUs would use TF32 for fp32 products."""
    layer = linear(256, 8, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    x = normal(4, 256)
    wanted = x.astype(np.float64) @ np.asarray(layer.kernel[...], np.float64)
    assert_close(jax.jit(lambda x: layer(x))(x), wanted, LAYER)


def test_a_single_row_is_a_product_of_two_on_a_gpu(monkeypatch):
    """What XLA:GPU makes of one row is no product; two rows and other devices stay as they are."""
    layer = linear(8, 5, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    table = Embedding(7, 8, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(1))

    def run(apply, x):
        program = jax.make_jaxpr(lambda x: apply(x))(x)
        (product,) = (one for one in program.eqns if one.primitive.name == "dot_general")
        return product.invars[0].aval.shape, apply(x)

    one, two = jnp.asarray(normal(1, 1, 8)), jnp.asarray(normal(2, 1, 8))
    for apply in (layer, table.attend):
        monkeypatch.undo()
        (_, wanted), shape_of_two = run(apply, one), run(apply, two)[0]
        assert math.prod(run(apply, one)[0]) == 8
        monkeypatch.setattr("pallas_kernels.product.platform", lambda: "gpu")
        shape, got = run(apply, one)
        assert shape == (2, 8)
        assert run(apply, two)[0] == shape_of_two == two.shape
        assert_close(got, wanted, LAYER)


@pytest.mark.parametrize(
    ("layer", "theirs"),
    [
        (SwiGLU, torch.nn.functional.silu),
        (GeGLU, functools.partial(torch.nn.functional.gelu, approximate="tanh")),
    ],
)
def test_gated_layers_round_as_torch_does(layer, theirs):
    """In bf16: products, activation and their product, each once."""
    ours = layer(32, 48, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(0.3 * rng.normal(size=(32, 96)), jnp.bfloat16)
    ours.gate_up_proj.kernel[...] = matrix
    x = jnp.asarray(rng.normal(size=(2, 3, 32)), jnp.bfloat16)

    def to_torch(array):
        return torch.tensor(np.asarray(array, np.float32)).bfloat16()

    gate, up = (to_torch(x) @ to_torch(matrix)).split(48, dim=-1)
    wanted = (theirs(gate) * up).float().numpy()
    got = np.asarray(ours.inner(x), np.float32)
    assert_close(got, wanted, KERNEL_BF16)
    assert (got != wanted).mean() < 0.02
