"""Draft methods of an evaluation: names, settings, and one copy of the target for all."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

from mmflash_jax.config import ServeConfig
from mmflash_jax.evaluation.batch import Session, load
from mmflash_jax.evaluation.evaluate_config import EvaluateConfig
from mmflash_jax.evaluation.records import PLAIN
from mmflash_jax.registry import PAIRS
from mmflash_jax.weights.hf_config import ConfigError

log = logging.getLogger(__name__)

SETTINGS = {f.name for f in dataclasses.fields(ServeConfig) if f.name.startswith("draft_")}
"""What serve.py lets a draft be told: `--draft-embedding-scale` is `draft_embedding_scale` here."""


OWN = "own"
"""The draft that a target's short name brings."""


def name_methods(config: EvaluateConfig) -> dict[str, str]:
    """Label -> draft and its settings, plain decoding first.

    Raises:
        ConfigError: two methods have one label.
    """
    given = config.methods
    if not given and config.target in PAIRS:
        given = (f"{Path(PAIRS[config.target].draft).name}={OWN}",)
    methods = {PLAIN: PLAIN}
    for method in given:
        label, mark, draft = method.partition("=")
        if not mark or "," in label:
            label, draft = Path(method).name, method
        if methods.get(label, draft) != draft:
            raise ConfigError(
                f"methods {methods[label]} and {draft} are both called {label!r}; write LABEL=DRAFT"
            )
        methods[label] = draft
    return methods


def load_methods(
    config: EvaluateConfig, methods: Mapping[str, str]
) -> tuple[dict[str, Session], bool]:
    """A session for every draft that fits, all with one copy of the target; and if one did not."""
    sessions: dict[str, Session] = {}
    failed = False
    for label, draft in methods.items():
        try:
            sessions[label] = load(_serve_config(config, draft), sessions.get(PLAIN))
        except (ValueError, OSError) as error:
            if label == PLAIN:
                raise
            log.error("method %s is left out: %s", label, error)
            failed = True
    return sessions, failed


def _serve_config(config: EvaluateConfig, method: str) -> ServeConfig:
    draft, *options = method.split(",")
    settings = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in SETTINGS:
            known = ", ".join(sorted(SETTINGS))
            raise ConfigError(f"{method!r}: a draft has no setting {name!r}; known are {known}")
        try:
            settings[name] = float(value) if "." in value else int(value)
        except ValueError:
            raise ConfigError(f"{method!r}: {name} is {value!r}, expected a number") from None
    if draft == OWN and config.target not in PAIRS:
        raise ConfigError(
            f"the target {config.target} brings no draft of its own; short names that do are "
            f"{', '.join(sorted(PAIRS))}"
        )
    return ServeConfig(
        target=config.target, draft=None if draft == OWN else draft, dtype=config.dtype,
        kernels=config.kernels, thinking=config.thinking, **settings,
    )  # fmt: skip
