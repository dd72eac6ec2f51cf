"""From an nnx module to a plain nested dict of arrays and back.

nnx serves as parameter schema and forward function only: a module is built under `eval_shape`,
split once into structure and a dict of abstract arrays, and merged again inside `jax.jit`, where
it costs nothing at run time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

Params = dict[Any, Any]
Path = tuple[str | int, ...]


def abstract_module(build: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Any, Params]:
    """Hashable structure and nested dict of `jax.ShapeDtypeStruct` of what `build` makes."""
    module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    structure, state = nnx.split(module)
    return structure, nnx.to_pure_dict(state)


def initialise(build: Callable[[nnx.Rngs], nnx.Module], seed: int) -> Params:
    """Freshly initialised parameters of the module `build` makes."""

    def init() -> Params:
        return nnx.to_pure_dict(nnx.state(build(nnx.Rngs(seed))))

    return jax.jit(init)()


def leaves_with_path(params: Params, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every array of a nested dict with its path of keys, in the dict's own order."""
    for key, value in params.items():
        if isinstance(value, dict):
            yield from leaves_with_path(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def set_leaf(params: Params, path: Path, value: Any) -> None:
    """Set the array at `path`, making the dicts on the way."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = value
