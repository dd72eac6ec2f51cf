"""Memory of the objective at full size, from the compiler; nothing is computed.

    python -m benchmarks.objective_memory --anchors 64 512 --report objective_memory.json

Compiles loss and gradients of the published 537 M draft over a row of 3,072 tokens and a vocabulary
of 248,320 from shapes alone and prints what the compiler sets aside. `temp` is everything alive
between arguments and results: context keys and values, activations of one chunk, logits, and the
accumulated gradients. A CPU has no bf16 products, so there fp32 copies of all weights come on top.
"""

import dataclasses
import functools
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro

from benchmarks import shapes
from mmflash_jax.config_train import ObjectiveConfig
from mmflash_jax.drafters import DFlash, Heads
from mmflash_jax.training.objective import block_loss, chunk_blocks


@dataclass(frozen=True)
class Arguments:
    """What to compile."""

    anchors: tuple[int, ...] = (64, 512)
    """Blocks a row; one line of the report each."""
    chunks: tuple[int, ...] = (0,)
    """Blocks at once; 0 is the default of the objective."""
    rows: int = 1
    row_length: int = 3072
    loss: Literal["ce", "kl"] = "ce"
    report: Path | None = None
    """JSON file for the figures. Default: they are printed."""


def main(arguments: Arguments) -> None:
    lines = [
        compiled_memory(arguments, anchors, chunk)
        for anchors in arguments.anchors
        for chunk in arguments.chunks
    ]
    figures = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "rows": arguments.rows,
        "row_length": arguments.row_length,
        "loss": arguments.loss,
        "measured": lines,
    }
    if arguments.report:
        arguments.report.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


def compiled_memory(arguments: Arguments, anchors: int, chunk: int) -> dict[str, Any]:
    """Bytes that one compiled loss with gradients needs."""
    drafter = DFlash.from_hf(
        {"architectures": ["DFlashDraftModel"], **shapes.QWEN35_DRAFT}, "bfloat16"
    )
    settings = ObjectiveConfig(anchors=anchors, loss=arguments.loss, chunk=chunk or None)
    step = jax.jit(jax.value_and_grad(functools.partial(loss_of, drafter, settings), has_aux=True))
    began = time.perf_counter()
    compiled = step.lower(*abstract_inputs(drafter, arguments, anchors)).compile()
    memory: Any = compiled.memory_analysis()
    kl = arguments.loss == "kl"
    return {
        "anchors": anchors,
        "chunk": chunk or chunk_blocks(drafter, arguments.rows, arguments.row_length, kl=kl),
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "compile_s": round(time.perf_counter() - began, 1),
    }


def loss_of(drafter: DFlash, settings: ObjectiveConfig, params: Any, batch: Any) -> Any:
    table = batch["table"]

    def logits(hidden: Any) -> Any:
        return jnp.einsum("...D,VD->...V", hidden, table, preferred_element_type=jnp.float32)

    return block_loss(
        drafter, params, Heads(embed=lambda ids: table[ids], logits=logits), batch["features"],
        batch["ids"], batch["total_len"], batch["anchors"], batch["valid"], settings,
        token_weight=batch["weight"], teacher_hidden=batch["hidden"], teacher_logits=logits,
    )  # fmt: skip


def abstract_inputs(drafter: DFlash, arguments: Arguments, anchors: int) -> tuple[Any, Any]:
    """Shapes of fp32 parameters and of a batch, with the target's features and its tied head."""
    config, rows, length = drafter.config, arguments.rows, arguments.row_length
    params = dataclasses.replace(drafter, dtype="float32").abstract_params()

    def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    captured = len(config.target_layer_ids) * config.target_hidden_size
    narrow = jnp.bfloat16
    return params, {
        "table": array(config.vocab_size, config.hidden_size, dtype=narrow),
        "features": array(rows, length, captured, dtype=narrow),
        "hidden": array(rows, length, config.hidden_size, dtype=narrow),
        "ids": array(rows, length),
        "total_len": array(rows),
        "anchors": array(rows, anchors),
        "valid": array(rows, anchors, dtype=bool),
        "weight": array(rows, length, dtype=jnp.float32),
    }


if __name__ == "__main__":
    main(tyro.cli(Arguments))
