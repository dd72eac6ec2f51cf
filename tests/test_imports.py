"""Imports go one way: the arrows of the architecture, read from the source."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("mmflash_jax", "pallas_kernels")

# A part may import parts of lower rank, and itself.
RANK = {
    "pallas_kernels": 0,
    "layers": 1,
    "demo": 1,
    "compilation": 1,
    "weights": 2,
    "sharding": 2,
    "registry": 2,
    "config": 3,
    "config_drafts": 4,
    "config_train": 5,
    "config_files": 4,
    "towers": 3,
    "drafters": 3,
    "targets": 4,
    "decode": 5,
    "load": 5,
    "engine": 6,
    "evaluation": 7,
    "training": 8,
    "server": 8,
}
# Targets and drafters meet in decoding only.
NEVER = {("targets", "drafters"), ("drafters", "targets"), ("pallas_kernels", "mmflash_jax")}
# What serving does not need; the demo's recipe and tests do.
DEV_ONLY = {"torch", "torchvision", "beartype", "pytest", "dflash"}
# No text, sockets, clocks or host frameworks in the compiled parts.
HOST_ONLY = {"time", "socket", "http", "tokenizers", "transformers", "PIL", "logging"}
COMPILED = ("decode", "layers", "targets", "drafters", "towers", "pallas_kernels")

FILES = sorted(path for name in OURS for path in (ROOT / name).rglob("*.py"))


def imported(path):
    """Every module a file imports, at top level or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            # `from package import part` names the part only there.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module):
    """The ranked part of a module of ours, None for others."""
    top, *rest = module.split(".")
    if top == "pallas_kernels":
        return top
    return rest[0] if top == "mmflash_jax" and rest and rest[0] in RANK else None


def part_of_file(path):
    return part_of(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    part = part_of_file(path)
    if part is None:
        assert path.name == "__init__.py", f"{path.name} has no rank: give it one above"
        return
    for module in imported(path):
        other = part_of(module)
        if other is None or other == part:
            continue
        assert (part, other) not in NEVER, f"{part} imports {module}"
        assert RANK[other] < RANK[part], f"{part} imports {module}, of a higher or the same rank"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_serving_needs_no_development_package(path):
    if "recipe" in path.parts:
        return
    tops = {module.split(".")[0] for module in imported(path)}
    assert not tops & DEV_ONLY
    if part_of_file(path) in COMPILED:
        # The choice of a kernel is made while tracing, and is told once.
        told = {"logging"} if path.name == "choose.py" else set()
        assert not tops & HOST_ONLY - told


def test_a_wrong_arrow_would_be_seen():
    assert part_of("mmflash_jax.engine.prompts") == "engine"
    assert part_of("mmflash_jax.load") == "load"
    assert part_of("pallas_kernels.gated_delta") == "pallas_kernels"
    assert part_of("jax.numpy") is None
    assert "mmflash_jax.decode.records" in set(imported(ROOT / "mmflash_jax/decode/loop.py"))


def test_no_file_is_a_drawer_for_everything():
    names = re.compile(r"^(utils?|common|helpers?|misc)$")
    assert not [path for path in FILES if names.match(path.stem)]
    long = [path for path in FILES if len(path.read_text().splitlines()) > 700]
    assert not long
