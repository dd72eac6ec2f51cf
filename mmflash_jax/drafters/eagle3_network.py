"""The network of EAGLE-3: projection of the target's features, one decoder layer, its own head."""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mmflash_jax.drafters.eagle3_config import Config
from mmflash_jax.layers.attention import Attention
from mmflash_jax.layers.linear import Embedding, linear
from mmflash_jax.layers.mlp import SwiGLU
from mmflash_jax.layers.norm import RMSNorm
from mmflash_jax.layers.rotary import rotary_angles
from mmflash_jax.layers.tree import BlockRows
from mmflash_jax.weights import TRANSPOSE, Rule, mlp_projections
from pallas_kernels import Kernels, block_attention


class Layer(nnx.Module):
    """A decoder layer over pairs of a token's row and a hidden state, each normed first."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        norm = functools.partial(RMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm, self.hidden_norm = norm(), norm()
        self.self_attn = Attention(
            config, 2 * config.hidden_size, normed=config.normed_heads, dtype=dtype, rngs=rngs
        )
        self.post_attention_layernorm = norm()
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype=dtype, rngs=rngs)

    def angles(self, position: Int[Array, "B T"]) -> Float[Array, "B T half"]:
        return rotary_angles(position, self.config.rope_theta, self.config.head_dim)

    def pairs(
        self, rows: Float[Array, "B T D"], hidden: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D2"], Float[Array, "B T D"]]:
        """What attention projects, and the residual."""
        normed = self.hidden_norm(hidden)
        joined = jnp.concatenate([self.input_layernorm(rows.astype(hidden.dtype)), normed], -1)
        return joined, normed if self.config.norm_before_residual else hidden

    def context(
        self,
        rows: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        position: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Keys and values of decided tokens: all that later ones need of them."""
        joined, _ = self.pairs(rows, hidden)
        made = self.self_attn.keys_values(joined, self.angles(position))
        return made.k, made.v

    def __call__(
        self,
        rows: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        position: Int[Array, "B T"],
        above: BlockRows,
        length: Int[Array, " B"],
        parents: Int[Array, "B U"],
        kernels: Kernels,
    ) -> tuple[Float[Array, "B T D"], BlockRows]:
        """Outputs of the last T of U drafted nodes, and the rows of all U; `above` holds those of
        the nodes before, and the context."""
        attention = self.self_attn
        joined, residual = self.pairs(rows, hidden)
        angles = self.angles(position)
        made = attention.rows(joined, angles, kernels)
        block = BlockRows(
            cache=above.cache,
            k=jnp.concatenate([above.k, made.k], axis=1),
            v=jnp.concatenate([above.v, made.v], axis=1),
        )
        mixed = block_attention(
            made.q, above.cache.k, above.cache.v, block.k, block.v, length,
            first=jnp.ones_like(length), parents=parents,
            scale=attention.head_dim**-0.5, causal=True, window=self.config.window,
            kernels=kernels,
        )  # fmt: skip
        x = residual + attention.o_proj(mixed.reshape(*mixed.shape[:2], -1))
        return x + self.mlp(self.post_attention_layernorm(x)), block


class Model(nnx.Module):
    """Projection of the features, the layer, the last norm, and a head of its own."""

    def __init__(self, config: Config, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width, captured = config.target_hidden_size, config.captured
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        if config.norm_before_fc:
            self.input_norm = norm(captured * width)
        if config.fc_norm:
            self.fc_norm = nnx.List([norm(width) for _ in range(captured)])
        self.fc = linear(captured * width, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layer = Layer(config, dtype=dtype, rngs=rngs)
        self.norm = norm(config.hidden_size)
        vocabulary = config.draft_vocab_size
        self.lm_head = Embedding(vocabulary, config.hidden_size, dtype=dtype, rngs=rngs)
        if vocabulary < config.vocab_size:
            self.d2t = nnx.Param(jnp.zeros((vocabulary,), jnp.int32))
            self.t2d = nnx.Param(jnp.arange(config.vocab_size) < vocabulary)

    def fuse(self, features: Float[Array, "B T features"]) -> Float[Array, "B T D"]:
        """One hidden state from the captured layers."""
        x = features.astype(self.fc.dtype)
        if self.config.norm_before_fc:
            x = self.input_norm(x)
        if self.config.fc_norm:
            parts = jnp.split(x, self.config.captured, axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            x = jnp.concatenate(normed, axis=-1)
        return self.fc(x)

    def fed_back(self, out: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The hidden state that the next drafts are paired with."""
        return self.norm(out) if self.config.norm_output else out

    def logits(self, out: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """fp32, over the target's vocabulary; -inf for tokens that the draft does not know."""
        known = self.lm_head.attend(self.norm(out))
        if self.config.draft_vocab_size == self.config.vocab_size:
            return known
        ids = jnp.arange(self.config.draft_vocab_size) + self.d2t[...]
        nothing = jnp.full((*known.shape[:-1], self.config.vocab_size), -jnp.inf, known.dtype)
        return nothing.at[..., ids].set(known)


def weight_rules(c: Config) -> list[Rule]:
    """Names of the tensors in a checkpoint, and where in `Model` they go."""
    rules = [
        Rule("fc.weight", ("fc", "kernel"), TRANSPOSE),
        Rule("norm.weight", ("norm", "weight")),
        Rule("lm_head.weight", ("lm_head", "embedding")),
    ]
    if c.norm_before_fc:
        rules.append(Rule("input_norm.weight", ("input_norm", "weight")))
    if c.fc_norm:
        rules += [Rule(f"fc_norm.{i}.weight", ("fc_norm", i, "weight")) for i in range(c.captured)]
    if c.draft_vocab_size < c.vocab_size:
        rules += [Rule(name, (name,)) for name in ("d2t", "t2d")]
    for name in "qkvo":
        at = ("layer", "self_attn", f"{name}_proj")
        hf = f"{c.prefix}self_attn.{name}_proj"
        rules.append(Rule(f"{hf}.weight", (*at, "kernel"), TRANSPOSE))
        if c.attention_bias:
            rules.append(Rule(f"{hf}.bias", (*at, "bias")))
    rules += mlp_projections(f"{c.prefix}mlp.", ("layer", "mlp"), c.intermediate_size)
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if c.normed_heads else []
    for name in norms:
        rules.append(Rule(f"{c.prefix}{name}.weight", ("layer", *name.split("."), "weight")))
    return rules
