"""From checkpoint folders to plans and parameters."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mmflash_jax.drafters import DRAFTERS, Chain, DFlash, Eagle3
from mmflash_jax.layers.schema import Params
from mmflash_jax.sharding import sharding_by_rules
from mmflash_jax.targets import TARGETS, Target
from mmflash_jax.weights import TensorStore, WeightsError, import_params
from mmflash_jax.weights.hf_config import ConfigError, read_json, require
from pallas_kernels import Kernels

log = logging.getLogger(__name__)


def default_dtype() -> str:
    """bf16 on accelerators; fp32 on a CPU, where bf16 products are far slower."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _by_architecture(folder: Path, known: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    config = read_json(folder / "config.json")
    names = require(config, "architectures", str(folder / "config.json"))
    for name in names:
        if name in known:
            return known[name], config
    raise ConfigError(f"{folder}: architectures is {names}, known here: {sorted(known)}")


def kernels_over(devices: int, kernels: Kernels) -> Kernels:
    """What "auto" stands for: a kernel is one device's, and XLA splits the reference over more."""
    if devices == 1 or kernels != "auto":
        return kernels
    log.info("kernels: reference, over %d devices", devices)
    return "reference"


def load_target(
    folder: Path, dtype: str, mesh: Mesh | None = None, *, kernels: Kernels = "reference"
) -> tuple[Target, Params]:
    """A target checkpoint in Hugging Face layout, each parameter in its dtype and sharding.

    `kernels` names the implementation of its operations (`pallas_kernels.choose`).

    Raises:
        ConfigError: the configuration is not supported.
        WeightsError: the tensors do not fit the configuration.
    """
    family, config = _by_architecture(folder, TARGETS)
    target = family.from_hf(config, dtype, kernels)
    params = import_params(
        target.weight_rules(),
        TensorStore(folder),
        target.abstract_params(),
        ignore=target.ignored,
        sharding=sharding_by_rules(target.SHARDING, mesh),
    )
    return target, params


def load_drafter(
    folder: Path,
    target: Target,
    dtype: str,
    mesh: Mesh | None = None,
    *,
    embedding_scale: float | None = None,
    draft_tokens: int | None = None,
    draft_top_k: int | None = None,
    draft_depth: int | None = None,
    kernels: Kernels = "reference",
) -> tuple[Any, Params]:
    """A draft checkpoint that fits `target`, of one of `DRAFTERS`.

    Its parameters are replicated over the mesh.

    `embedding_scale` replaces `input_embedding_scale` of a DFlash draft's config, `draft_tokens`
    the number of tokens that a chain drafts. `draft_top_k` and `draft_depth` make EAGLE-3 draft a
    tree (`drafters.eagle3.Eagle3`).

    Raises:
        ConfigError: the configuration is not supported, or the draft has no such setting.
        FitError: draft and target do not belong together.
        WeightsError: the tensors do not fit the configuration.
    """
    drafter = _drafter(folder, dtype, kernels)
    drafter.check_fit(target.config)
    if embedding_scale is not None:
        if not isinstance(drafter, DFlash):
            raise ConfigError(
                f"draft_embedding_scale is {embedding_scale}, but {folder} is no DFlash draft; "
                "leave it out"
            )
        scaled = dataclasses.replace(drafter.config, input_embedding_scale=embedding_scale)
        drafter = dataclasses.replace(drafter, config=scaled)
    if isinstance(drafter, Eagle3):
        drafter = drafter.for_target(target.config)
        drafter = drafter.shaped(tokens=draft_tokens, top_k=draft_top_k, depth=draft_depth)
        params = _draft_params(folder, drafter, mesh)
        drafter.check_params(params)
        return drafter, params
    for name, value in {"draft_top_k": draft_top_k, "draft_depth": draft_depth}.items():
        if value is not None:
            raise ConfigError(f"{name} is {value}, but {folder} is no EAGLE-3 draft; leave it out")
    if draft_tokens is not None:
        if not isinstance(drafter, Chain):
            raise ConfigError(
                f"draft_tokens is {draft_tokens}, but the draft in {folder} was trained for blocks "
                f"of {drafter.block} tokens; leave it out"
            )
        drafter = dataclasses.replace(drafter, draft_tokens=draft_tokens)
    return drafter, _draft_params(folder, drafter, mesh)


def load_any_drafter(folder: Path, dtype: str) -> tuple[DFlash, Params]:
    """A DFlash checkpoint by itself, whatever its target may be; raises as `load_drafter` does."""
    drafter = _drafter(folder, dtype)
    if not isinstance(drafter, DFlash):
        raise ConfigError(f"{folder} holds no DFlash draft")
    return drafter, _draft_params(folder, drafter, None)


def _drafter(folder: Path, dtype: str, kernels: Kernels = "reference") -> Any:
    family, config = _by_architecture(folder, DRAFTERS)
    return family.from_hf(config, dtype, kernels)


def _draft_params(folder: Path, drafter: Any, mesh: Mesh | None) -> Params:
    rules, store = drafter.weight_rules(), TensorStore(folder)
    if not any(rule.hf in store for rule in rules):
        raise WeightsError(
            f"{folder} holds no tensor of a {type(drafter).__name__} draft ({rules[0].hf} and "
            f"{len(rules) - 1} more)"
        )
    return import_params(
        rules,
        store,
        drafter.abstract_params(),
        ignore=drafter.ignored,
        sharding=sharding_by_rules((), mesh),
    )


def warn_of_ordinary_mask(drafter: DFlash, tokenizer: Any) -> None:
    """Warn if the draft's masked slots carry a token that ordinary text holds too.

    The draft could not tell such a slot from a known token. An added token, or a row that the
    tokenizer does not use, is what a mask should be.
    """
    mask = drafter.config.mask_token_id
    if mask < len(tokenizer) and mask not in tokenizer.added_tokens_decoder:
        token = tokenizer.convert_ids_to_tokens(mask)
        log.warning("the draft's mask_token_id %d is %r, a token of ordinary text", mask, token)


def stop_ids(folder: Path, *more: int | None) -> tuple[int, ...]:
    """Every id that ends an answer: of the generation config, the config and `more`.

    They are joined because released files disagree: Qwen3.5's config stops at the end of text,
    its tokenizer at the end of a turn.
    """
    found: set[int] = {id for id in more if id is not None}
    config = read_json(folder / "config.json")
    sources = [config, config.get("text_config") or {}]
    if (folder / "generation_config.json").exists():
        sources.append(read_json(folder / "generation_config.json"))
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))
