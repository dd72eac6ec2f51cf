"""Settings that every test shares; they must be made before jax and torch start."""

import gc
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Models this small take far longer to compile than to run: most of it goes to LLVM's optimiser, to
# the newer generator of fusions (jax 0.11 has no other) and to splitting a program among threads.
# With XLA_FLAGS=--xla_force_host_platform_device_count=4 the programs are those that users run.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jax
import pytest
import torch
from transformers.utils import logging as transformers_logging

from tests import tiny

# More threads than one only wait for each other on models this small.
torch.set_num_threads(1)
transformers_logging.disable_progress_bar()
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    """With `-n`, a process takes whole files, and one of them all files about the server: they
    share what is slow to make."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    # Not by the number of tests, which says nothing about how long they take.
    config.option.loadscopereorder = False
    return ByFile(config, log)


def scope_of(nodeid: str) -> str:
    file = nodeid.split("::")[0]
    return "tests/server" if file.startswith("tests/server/") else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process is left alone with it at the end."""
    slow = {scope_of(item.nodeid) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: scope_of(item.nodeid) not in slow | {"tests/server"})


def pytest_collection_finish(session: pytest.Session) -> None:
    """Imported modules stay, so the garbage collector need not look at them again: tracing makes so
    many objects that it would spend a fifth of the time there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


# Every compiled program takes memory mappings, of which Linux gives a process 65,530; beyond them
# the compiler crashes. Dropped programs come back from the cache on disk.
MOST_MAPPINGS = 20_000


@pytest.fixture(autouse=True, scope="module")
def _few_mappings(request: pytest.FixtureRequest):
    yield
    if request.module.__name__.startswith("tests.server."):
        # One server runs through all of these, and its promise is to compile nothing more.
        return
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def qwen35(tmp_path_factory: pytest.TempPathFactory) -> tiny.Checkpoint:
    """A tiny Qwen3.5 with tied embeddings: its folder and its transformers model."""
    folder = tmp_path_factory.mktemp("qwen35")
    return tiny.Checkpoint(folder, tiny.tiny_qwen35(folder))
