"""Two-way tables between checkpoint tensors and our parameter dicts.

A model lists one `Rule` for each tensor. The same list imports (strictly: every tensor used once,
every parameter filled once, every shape right) and exports. A tensor is a parameter of its own, or
lies beside others in one, so that they are multiplied together.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mmflash_jax.layers.schema import Params, Path, leaves_with_path, set_leaf


class WeightsError(ValueError):
    """A checkpoint and a model do not fit; the message lists every tensor at fault."""


@dataclass(frozen=True)
class Transform:
    """An invertible change of layout, of numpy or jax arrays; views where numpy can."""

    name: str
    to_ours: Callable[[Any], Any]
    to_hf: Callable[[np.ndarray], np.ndarray]


IDENTITY = Transform("identity", lambda x: x, lambda x: x)
TRANSPOSE = Transform("transpose", lambda x: x.T, lambda x: x.T)
# torch keeps a depthwise kernel as [channels, 1, taps]; ours is [taps, channels].
SQUEEZE_CONV1D = Transform("squeeze_conv1d", lambda x: x[:, 0].T, lambda x: x.T[:, None])


def flatten_patches(patch_shape: tuple[int, ...]) -> Transform:
    """A convolution whose stride is its kernel: `[out, *patch]` <-> matrix `[pixels, out]`."""
    return Transform(
        "flatten_patches",
        lambda x: x.reshape(x.shape[0], -1).T,
        lambda x: x.T.reshape(x.shape[1], *patch_shape),
    )


@dataclass(frozen=True)
class Rule:
    """One tensor: its checkpoint name, its path in our dict, and the change between them.

    columns: the first of the parameter's last axis that it fills and the one past the last, if it
        does not fill all of them.
    """

    hf: str
    path: Path
    via: Transform = IDENTITY
    columns: tuple[int, int] | None = None

    def needs(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """The tensor's shape in our layout, from its parameter's."""
        if self.columns is None:
            return tuple(parameter)
        start, stop = self.columns
        return (*parameter[:-1], stop - start)

    def stored(self, parameter: Sequence[int]) -> tuple[int, ...]:
        """The tensor's shape in a checkpoint, from its parameter's."""
        return self.via.to_hf(np.broadcast_to(np.uint8(0), self.needs(parameter))).shape


def side_by_side(matrices: Mapping[str, int], path: Path) -> list[Rule]:
    """Rules of matrices `[out, in]`, names to `out`, whose columns lie beside each other in one
    kernel `[in, sum of out]`, in this order."""
    ends = list(itertools.accumulate(matrices.values(), initial=0))
    return [
        Rule(name, path, TRANSPOSE, columns)
        for name, columns in zip(matrices, itertools.pairwise(ends), strict=True)
    ]


def import_params(
    rules: Sequence[Rule],
    store: Mapping[str, np.ndarray],
    abstract: Params,
    *,
    ignore: Iterable[str] = (),
    sharding: Callable[[Path], jax.sharding.Sharding | None] = lambda _: None,
) -> Params:
    """Read every parameter of `abstract` from `store`, each in its dtype and sharding.

    Each device receives only its own slices. `ignore` holds regular expressions of checkpoint
    names that may be present and unused.

    Raises:
        WeightsError: tensors are missing, unexpected, mis-shaped or matched twice; all at once.
    """
    wanted = dict(leaves_with_path(abstract))
    problems = _compare(rules, store, wanted, tuple(re.compile(p) for p in ignore))
    if problems:
        lines = "\n  ".join(problems)
        raise WeightsError(f"{len(problems)} tensors do not fit the model:\n  {lines}")
    params: Params = {}
    for path, parts in _by_path(rules).items():
        dtype, placing = wanted[path].dtype, sharding(path)
        if placing is None or len(parts) == 1:
            # Joined on the device, where transposing is fast.
            leaves = [_place(store[part.hf], part.via, dtype, placing) for part in parts]
            leaf = leaves[0] if len(parts) == 1 else jnp.concatenate(leaves, axis=-1)
        else:
            views = [part.via.to_ours(store[part.hf]) for part in parts]
            leaf = _place(np.concatenate(views, axis=-1), IDENTITY, dtype, placing)
        set_leaf(params, path, leaf)
    return params


def _by_path(rules: Sequence[Rule]) -> dict[Path, list[Rule]]:
    """The rules of each parameter, in the order of their columns."""
    found: dict[Path, list[Rule]] = {}
    for rule in sorted(rules, key=lambda rule: rule.columns or (0, 0)):
        found.setdefault(rule.path, []).append(rule)
    return found


def _filled_once(parts: Sequence[Rule], shape: Sequence[int]) -> bool:
    """Whether the rules of a parameter fill each of its columns once."""
    if len(parts) == 1 and parts[0].columns is None:
        return True
    spans = [part.columns or (0, shape[-1]) for part in parts]
    return all(
        a[1] == b[0] for a, b in zip([(0, 0), *spans], [*spans, (shape[-1], 0)], strict=True)
    )


def _compare(
    rules: Sequence[Rule],
    store: Mapping[str, np.ndarray],
    wanted: Mapping[Path, jax.ShapeDtypeStruct],
    ignore: tuple[re.Pattern[str], ...],
) -> list[str]:
    names = Counter(rule.hf for rule in rules)
    paths = _by_path(rules)
    problems = [f"matched twice: {name}" for name, count in names.items() if count > 1]
    problems += [
        f"filled twice, or not whole: {_dotted(path)}"
        for path, parts in paths.items()
        if path in wanted and not _filled_once(parts, wanted[path].shape)
    ]
    problems += [f"stored twice: {name}" for name in getattr(store, "duplicates", ())]
    problems += [f"no rule for parameter: {_dotted(p)}" for p in wanted if p not in paths]
    problems += [f"rule for no parameter: {_dotted(p)}" for p in paths if p not in wanted]
    for rule in rules:
        if rule.hf not in store:
            problems.append(f"missing: {rule.hf}")
        elif rule.path in wanted:
            stored, needed = store[rule.hf], rule.needs(wanted[rule.path].shape)
            shape = tuple(rule.via.to_ours(np.broadcast_to(np.uint8(0), stored.shape)).shape)
            if shape != tuple(needed):
                problems.append(
                    f"wrong shape: {rule.hf} is {list(stored.shape)}, which gives {list(shape)}; "
                    f"{_dotted(rule.path)} needs {list(needed)}"
                )
    problems += [
        f"unexpected: {name}"
        for name in store
        if name not in names and not any(pattern.match(name) for pattern in ignore)
    ]
    return problems


def _place(
    stored: np.ndarray, via: Transform, dtype: np.dtype, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """A tensor on its device. Whole ones change their layout there, where transposing is fast."""
    if sharding is None:
        return jnp.asarray(via.to_ours(jax.device_put(stored)), dtype)
    view = via.to_ours(stored)

    def part(index: Any) -> np.ndarray:
        return np.ascontiguousarray(view[index]).astype(dtype, copy=False)

    return jax.make_array_from_callback(view.shape, sharding, part)


def export_params(
    rules: Sequence[Rule], params: Params, *, float32: Iterable[str] = ()
) -> dict[str, np.ndarray]:
    """Checkpoint tensors of `params`: bf16, or fp32 where a name matches one of `float32`.

    Integers are stored as int64, truth values as they are.
    """
    wide = tuple(re.compile(pattern) for pattern in float32)
    arrays = dict(leaves_with_path(params))
    tensors = {}
    for rule in rules:
        array = np.asarray(jax.device_get(arrays[rule.path]))
        array = rule.via.to_hf(array if rule.columns is None else array[..., slice(*rule.columns)])
        tensors[rule.hf] = array.astype(_stored_dtype(rule.hf, array.dtype, wide))
    return tensors


def _stored_dtype(name: str, dtype: np.dtype, wide: tuple[re.Pattern[str], ...]) -> np.dtype:
    if dtype == np.bool_:
        return dtype
    if np.issubdtype(dtype, np.integer):
        return np.dtype(np.int64)
    keep = any(pattern.search(name) for pattern in wide)
    return np.dtype(np.float32 if keep else ml_dtypes.bfloat16)


def _dotted(path: Path) -> str:
    return ".".join(str(key) for key in path)
