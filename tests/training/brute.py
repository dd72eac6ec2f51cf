"""The objective as one big attention in fp64 numpy: all queries and keys, and a mask table.

Nothing here is shared with the product but the names of parameters. Blocks of a row are laid out as
training systems with one flat sequence do: keys are [S context | A * T block slots], the table says
who sees whom, by position and document. Positions restart in every document of a packed row.
"""

from typing import Any, NamedTuple

import numpy as np

from mmflash_jax.drafters import DFlash
from tests.training import toy


class Case(NamedTuple):
    """Inputs of one batch; `segments` number the documents of each row."""

    features: np.ndarray
    ids: np.ndarray
    total_len: np.ndarray
    anchors: np.ndarray
    valid: np.ndarray
    token_weight: np.ndarray
    segments: np.ndarray


def mask_table(
    anchors: np.ndarray, segments: np.ndarray, block: int, causal: bool, window: int | None
) -> np.ndarray:
    """`[A * T, S + A * T]` of one row: does this query see this key?"""
    S, queries = len(segments), len(anchors) * block
    table = np.zeros((queries, S + queries), bool)
    for query in range(queries):
        j, k = divmod(query, block)
        p = anchors[j]
        for t in range(S):
            near = window is None or t >= p + k - (window - 1)
            table[query, t] = t < p and segments[t] == segments[p] and near
        for key in range(queries):
            other, slot = divmod(key, block)
            near = window is None or abs(slot - k) <= window - 1
            table[query, S + key] = other == j and near and (not causal or slot <= k)
    return table


def logits_of(plan: DFlash, params: Any, case: Case) -> np.ndarray:
    """`[B, A, T, V]` of every slot, the anchor's included."""
    weights = _wide(params)
    return np.stack([_row_logits(plan, weights, case, row) for row in range(len(case.ids))])


def objective(
    logits: np.ndarray,
    case: Case,
    decay: float,
    *,
    dpace: float | None = None,
    teacher: np.ndarray | None = None,
) -> float:
    """Loss of logits `[B, A, T, V]`; `teacher` `[B, S, V]` makes it the divergence from these."""
    total = divisor = 0.0
    for row, a in np.ndindex(*case.anchors.shape):
        if not case.valid[row, a]:
            continue
        p = int(case.anchors[row, a])
        places = {k: p + k for k in range(1, logits.shape[2]) if _supervised(case, row, p, p + k)}
        logs = {k: _log_softmax(logits[row, a, k]) for k in places}
        reach, reached = 1.0, {}
        for k, place in places.items():
            alpha = dpace or 0.0
            reach *= (1 - alpha) * np.exp(logs[k][case.ids[row, place]]) + alpha
            reached[k] = reach
        for k, place in places.items():
            loss = -logs[k][case.ids[row, place]]
            if teacher is not None:
                log_p = _log_softmax(teacher[row, place - 1])
                loss = float(np.exp(log_p) @ (log_p - logs[k]))
            weight = np.exp(-(k - 1) / decay)
            if dpace is not None:
                weight = sum(c for m, c in reached.items() if m >= k)
            total += weight * case.token_weight[row, place] * loss
            divisor += weight
    return float(total / divisor)


def _supervised(case: Case, row: int, anchor: int, place: int) -> bool:
    return bool(
        place < case.total_len[row]
        and (case.segments[row, anchor : place + 1] == case.segments[row, anchor]).all()
        and case.token_weight[row, place] > 0
    )


def _row_logits(plan: DFlash, weights: Any, case: Case, row: int) -> np.ndarray:
    config, block = plan.config, plan.block
    anchors, segments = case.anchors[row], case.segments[row]
    # Of the document that a token is in: its own running number.
    restarted = np.array(
        [t - np.flatnonzero(segments == segments[t])[0] for t in range(len(segments))]
    )
    slots = (restarted[anchors][:, None] + np.arange(block)).reshape(-1)
    ids = np.full((len(anchors), block), config.mask_token_id)
    ids[:, 0] = case.ids[row, anchors]
    x = toy.TABLE.astype(np.float64)[ids.reshape(-1)] * config.input_embedding_scale
    projected = case.features[row].astype(np.float64) @ weights["fc"]["kernel"]
    context = _norm(projected, weights["hidden_norm"]["weight"], config.rms_norm_eps)
    for number, layer in enumerate(config.layers):
        table = mask_table(anchors, segments, block, layer.causal, layer.window)
        x = _layer(x, context, slots, restarted, table, weights["layers"][number], config)
    x = _norm(x, weights["norm"]["weight"], config.rms_norm_eps)
    return (x @ toy.HEAD.astype(np.float64)).reshape(len(anchors), block, -1)


def _layer(x, context, slots, restarted, table, w, config):
    eps, attention = config.rms_norm_eps, w["self_attn"]
    normed = _norm(x, w["input_layernorm"]["weight"], eps)
    both, places = np.concatenate([context, normed]), np.concatenate([restarted, slots])

    def split(rows, name):
        return (rows @ attention[name]["kernel"]).reshape(len(rows), -1, config.head_dim)

    q = _rotate(_norm(split(normed, "q_proj"), attention["q_norm"]["weight"], eps), slots, config)
    k = _rotate(_norm(split(both, "k_proj"), attention["k_norm"]["weight"], eps), places, config)
    v = split(both, "v_proj")
    group = q.shape[1] // k.shape[1]
    mixed = np.zeros(q.shape)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T * config.head_dim**-0.5
        seen = np.exp(_log_softmax(np.where(table, scores, -np.inf)))
        mixed[:, head] = seen @ v[:, head // group]
    x = x + mixed.reshape(len(x), -1) @ attention["o_proj"]["kernel"]
    normed = _norm(x, w["post_attention_layernorm"]["weight"], eps)
    gate, up = np.split(w["mlp"]["gate_up_proj"]["kernel"], 2, axis=1)
    down = w["mlp"]["down_proj"]["kernel"]
    gated = normed @ gate
    return x + (gated / (1 + np.exp(-gated)) * (normed @ up)) @ down


def _rotate(x: np.ndarray, places: np.ndarray, config: Any) -> np.ndarray:
    half = config.head_dim // 2
    angle = places[:, None] * config.rope_theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    one, two = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def _wide(tree: Any) -> Any:
    if hasattr(tree, "items"):
        return {name: _wide(part) for name, part in tree.items()}
    return np.asarray(tree, np.float64)
