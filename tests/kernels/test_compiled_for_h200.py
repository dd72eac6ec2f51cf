"""The decoding loop compiled for an H200 without one: spills, copies, aliases, one CUDA graph.

`make compiled` installs what that takes and runs this; elsewhere it is skipped and says what is
missing (`benchmarks/compiled.py`). Each program is compiled in a process of its own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compiled

ROOT = Path(__file__).parents[2]
# The fewest layers of each family that hold every kind.
LAYERS = {"qwen35": 4, "gemma4": 12}
# Family, drafter, kernels, batch, the most launches of a step and the most megabytes beside weights
# and caches: two sets of fp32 logits and what a split context leaves to be merged.
PROGRAMS = [
    ("qwen35", "none", "auto", 1, 61, 2),
    ("qwen35", "none", "gpu", 8, 55, 9),
    ("qwen35", "dflash", "auto", 1, 143, 18),
    # From 33 rows on the kernel of the head leaves the logits out.
    ("qwen35", "dflash", "auto", 4, 142, 16),
    ("qwen35", "dflash", "auto", 8, 140, 24),
    ("qwen35", "dflash", "auto", 16, 134, 40),
    ("qwen35", "dflash", "auto", 32, 132, 46),
    ("qwen35", "dflash", "reference", 1, 327, 23),
    ("gemma4", "none", "auto", 1, 193, 4),
    ("gemma4", "none", "reference", 1, 390, 4),
    ("gemma4", "dflash", "auto", 8, 281, 31),
]
# How many of a step's launches are those of pallas_kernels/hopper.py: o and down of 4 layers and 5
# of the draft with 128 rows, and both heads.
STREAMED = {4: 2, 8: 20, 16: 2, 32: 2}
# Attention of one token keeps up to 68 bytes a thread of heads of 512 aside, and 4 of 256: tiles
# that do not are 8 to 13 % slower (benchmarks/results/kernels_h200.json).
MAY_SPILL = [("gemma4", "none", "auto", 1)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        compiled.obstacle() is not None, reason=f"no compiler for an H200: {compiled.obstacle()}"
    ),
]


@pytest.mark.parametrize(
    ("family", "drafter", "kernels", "batch", "launches", "megabytes"), PROGRAMS
)
def test_a_step_copies_nothing_large_and_is_one_graph(
    family, drafter, kernels, batch, launches, megabytes
):
    flags = {"family": family, "drafter": drafter, "kernels": kernels, "batch": str(batch)}
    flags["layers"] = str(LAYERS[family])
    command = [sys.executable, "-m", "benchmarks.compiled"]
    command += [part for name, value in flags.items() for part in (f"--{name}", value)]
    if (family, drafter, kernels, batch) in MAY_SPILL:
        command.append("--spills")
    # Without the flags of tests/conftest.py: what counts here is the optimised program.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    # Mosaic GPU calls ptxas itself, and prints what that says if asked to.
    environment["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    # Else registers that spill end the compilation with an error.
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout[run.stdout.index("{\n") :])
    said = run.stdout + run.stderr
    spilled = [int(size) for size in re.findall(r"(\d+) bytes spill stores", said)]
    assert not any(spilled)
    if family == "qwen35" and kernels == "auto" and batch in STREAMED and drafter == "dflash":
        assert spilled, "ptxas says nothing of the kernels of Mosaic GPU"
        assert report["kinds"]["mosaic_gpu_v2"] == STREAMED[batch]
    assert report["graphs"] == ["kCommandBuffer"]
    assert report["weights_written"] == []
    assert report["aliased_bytes"] >= report["cache_bytes"]
    # A copy of weights would be 50 MB and more.
    assert report["temp_bytes"] <= megabytes * 1e6
    assert report["launches"] <= launches
