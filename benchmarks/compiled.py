"""What XLA makes of a decoding step for an H200, found without the card.

    JAX_PLATFORMS=cpu python -m benchmarks.compiled --family gemma4 --drafter none --batch 1

Compiles the real loop at full width over shapes alone and reports what a step launches, what it
copies, and the memory it takes beside weights and caches. Needs Python 3.12 and the extra `h200`
(`pip install -e ".[h200]"`): jax 0.11 with its plug-in for CUDA 13, `ptxas` and libdevice.
Without a card nothing is autotuned: the tiles of XLA's products are placeholders.
"""

import collections
import functools
import importlib.util
import json
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.decode import filled
from benchmarks.full_size import ARCHITECTURES, Family, draft_config, target_config
from benchmarks.methods import read_method
from benchmarks.random_drafts import assistant_config, eagle3_config
from mmflash_jax.decode.loop import decode
from mmflash_jax.decode.records import Plan
from mmflash_jax.drafters import DFlash, Eagle3, Gemma4Assistant, NoDraft, Qwen35MTP
from mmflash_jax.targets import TARGETS
from pallas_kernels import Kernels

# What the compiler needs to know of an H200 SXM: CUDA's device properties and the data sheet.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 device_memory_size: 151397597184 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 pcie_bandwidth: 34359738368 device_address_bits: 64 ecc_enabled: true
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
NO_SPILLS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}


def obstacle() -> str | None:
    """Why this machine cannot compile for an H200."""
    if jax.__version_info__ < (0, 11):
        return f"jax {jax.__version__} is older than 0.11"
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "jax-cuda13-plugin and jax-cuda13-pjrt are not installed"
    try:
        version("nvidia-cuda-nvcc")
    except PackageNotFoundError:
        if shutil.which("ptxas") is None:
            return "nvidia-cuda-nvcc is not installed, and there is no ptxas on the path"
    return None


@functools.cache
def _device() -> Any:
    topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1")
    return topology.devices[0]


def compile_for_h200(
    jitted: Callable[..., Any], *arguments: Any, options: dict[str, Any] | None = None
) -> Any:
    """The compiled program of a `jax.jit` function; arrays among `arguments` may be shapes."""
    placed = NamedSharding(Mesh([_device()], ("x",)), PartitionSpec())

    def place(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    described = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=described)
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = jitted.trace(*jax.tree.map(place, arguments))  # type: ignore[attr-defined]
        lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=options)


@dataclass(frozen=True)
class Arguments:
    """What to compile."""

    family: Family = "qwen35"
    drafter: str = "dflash"
    """A method of `benchmarks.methods`."""
    kernels: Kernels = "reference"
    batch: int = 1
    layers: int | None = None
    """Layers of the target; fewer compile faster. Default: as published."""
    context: int = 1024
    spills: bool = False
    """Let kernels spill registers; else that is an error."""
    hlo: Path | None = None
    """File for the optimised program."""
    options: tuple[str, ...] = ()
    """XLA options for this compilation, each `name=value`."""
    dump: Path | None = None
    """Folder for XLA's own dumps, among them the sequence of launches."""


def abstract_decode(arguments: Arguments) -> tuple[Plan, Any, Any]:
    """Plan, and shapes of parameters and state."""
    config = target_config(arguments.family, arguments.layers).to_dict()
    family = TARGETS[ARCHITECTURES[arguments.family]]
    target = family.from_hf(config, "bfloat16", arguments.kernels)
    method = read_method(arguments.drafter)
    drafter: Any = NoDraft()
    params = {"target": target.abstract_params(), "drafter": {}}
    if method.kind != "none":
        made, own = draft_of(method.kind, arguments, config)
        drafter = method.shaped(made.from_hf(own, "bfloat16", arguments.kernels))
        drafter.check_fit(target.config)
        params["drafter"] = drafter.abstract_params()
    plan = Plan(target, drafter, (1, 2))
    capacity = -(-(arguments.context + 528) // 64) * 64
    now = jax.ShapeDtypeStruct((), jnp.int32)
    make = functools.partial(filled, plan, arguments.batch, capacity, 512)
    return plan, params, jax.eval_shape(make, now)


def draft_of(kind: str, arguments: Arguments, target: dict[str, Any]) -> tuple[Any, Any]:
    """Class and config of a draft for a target with that config."""
    text = target["text_config"]
    if kind == "dflash":
        own = draft_config(arguments.family, arguments.layers)
        return DFlash, own | {"architectures": ["DFlashDraftModel"]}
    if kind == "eagle3":
        return Eagle3, eagle3_config(text)
    if kind == "mtp":
        return Qwen35MTP, target
    return Gemma4Assistant, assistant_config(text)


# What launches nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "after-all", "call", "opt-barrier", "partition-id", "replica-id",
}  # fmt: skip
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")


@dataclass(frozen=True)
class Launch:
    """One instruction of the step: its name, result type, opcode and source."""

    name: str
    shape: str
    opcode: str
    text: str


def computations(hlo: str) -> dict[str, list[Launch]]:
    """Instructions of every computation of an optimised program."""
    found: dict[str, list[Launch]] = {}
    current: list[Launch] = []
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            header = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)
            assert header is not None
            current = found.setdefault(header[1], [])
        elif match := _INSTRUCTION.match(line):
            current.append(Launch(match[1], match[2], match[3], line.strip()))
    return found


def step_launches(hlo: str) -> list[Launch]:
    """What the body of the outer loop launches, in order; loops inside it count once."""
    parts = computations(hlo)
    bodies = re.findall(r"body=%?([\w.\-]+)", hlo)
    body = max(bodies, key=lambda name: len(parts[name]))
    return [one for one in parts[body] if one.opcode not in _FREE]


def shapes_of(result: str) -> list[tuple[int, ...]]:
    """Shapes of the parts of a result type."""
    found = re.findall(r"\w+\[([\d,]*)\]", result)
    return [tuple(int(size) for size in sizes.split(",") if size) for sizes in found]


def summary(compiled: Any, params: Any, state: Any, dump: Path) -> dict[str, Any]:
    """Launches of a step by kind, weights that it writes to memory, and memory."""
    launches = step_launches(compiled.as_text())
    kinds = collections.Counter(kind_of(one) for one in launches)
    matrices = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    written = [one for one in launches if matrices & set(shapes_of(one.shape))]
    inputs = {shape[0] for shape in matrices}
    joined = [
        one
        for one in launches
        if one.name.startswith("wrapped_concatenate")
        and any(len(shape) == 2 and shape[0] in inputs for shape in shapes_of(one.shape))
    ]
    memory = compiled.memory_analysis()
    caches = jax.tree.leaves((state.cache, state.draft))
    return {
        "launches": len(launches),
        "kinds": dict(kinds.most_common()),
        "graphs": body_thunks(dump),
        "weights_written": [f"{one.name} {one.shape}" for one in written + joined],
        "cache_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in caches),
        "aliased_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


def body_thunks(dump: Path) -> list[str]:
    """What the host issues for one turn of the outer loop; one `kCommandBuffer` is a CUDA graph."""
    (file,) = dump.glob("*jit_decode*thunk_sequence_after_thunk_passes.txt")
    text = file.read_text()
    lines = [line for line in text[text.index("  body:") :].splitlines()[1:] if line.strip()]

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    return [line.split()[1] for line in lines if indent(line) == indent(lines[0])]


def kind_of(launch: Launch) -> str:
    """The opcode; for fusions and calls what they are made of."""
    if launch.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]+)"', launch.text)
        return target[1] if target else "custom-call"
    if launch.opcode != "fusion":
        return launch.opcode
    kind = re.search(r'"kind":"(__\w+)"', launch.text)
    if kind:
        return kind[1].strip("_")
    plain = re.search(r"kind=k(\w+)", launch.text)
    return f"fusion {plain[1].lower()}" if plain else "fusion"


def main(arguments: Arguments) -> int:
    if (reason := obstacle()) is not None:
        print(f"cannot compile for an H200 here: {reason}", file=sys.stderr)
        return 2
    plan, params, state = abstract_decode(arguments)
    options: dict[str, Any] = {} if arguments.spills else dict(NO_SPILLS)
    for option in arguments.options:
        name, value = option.split("=", 1)
        options[name] = {"true": True, "false": False}.get(value, value)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    with tempfile.TemporaryDirectory() as folder:
        dump = arguments.dump or Path(folder)
        options["xla_dump_to"] = str(dump)
        compiled = compile_for_h200(decode, plan, params, state, steps, options=options)
        report = summary(compiled, params, state, dump)
    if arguments.hlo is not None:
        arguments.hlo.write_text(compiled.as_text())
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
