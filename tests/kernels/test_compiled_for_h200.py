"""The decoding loop compiled for an H200 without one: spills, copies, aliases, one CUDA graph.

Skipped where the compiler's parts are missing (`benchmarks/compiled.py` says which). It runs in a
process of its own: the compiler's plug-in and these tests' checks of shapes stay apart.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compiled

ROOT = Path(__file__).parents[2]
# The fewest layers of each family that hold every kind.
LAYERS = {"qwen35": 4, "gemma4": 12}
PROGRAMS = [
    ("qwen35", "dflash", "gpu", 1),
    ("qwen35", "dflash", "gpu", 32),
    ("qwen35", "none", "gpu", 8),
    ("qwen35", "dflash", "reference", 1),
    ("gemma4", "dflash", "gpu", 8),
    ("gemma4", "none", "reference", 1),
    ("qwen35", "none", "gpu", 1),
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        compiled.obstacle() is not None, reason=f"no compiler for an H200: {compiled.obstacle()}"
    ),
]


@pytest.mark.parametrize(("family", "drafter", "kernels", "batch"), PROGRAMS)
def test_a_step_copies_nothing_large_and_is_one_graph(family, drafter, kernels, batch):
    flags = {"family": family, "drafter": drafter, "kernels": kernels, "batch": str(batch)}
    flags["layers"] = str(LAYERS[family])
    command = [sys.executable, "-m", "benchmarks.compiled"]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    # Without the flags of tests/conftest.py: what counts here is the optimised program.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    # Registers that spill end the compilation with an error.
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout[run.stdout.index("{") :])
    assert report["graphs"] == ["kCommandBuffer"]
    assert report["weights_written"] == []
    assert report["aliased_bytes"] >= report["cache_bytes"]
    # Two sets of logits and a split of the context; a copy of weights would be 50 MB and more. With
    # 128 rows the kernel of the head leaves the logits out.
    assert report["temp_bytes"] <= batch * (5e6 if kernels == "gpu" and batch == 8 else 45e6)
