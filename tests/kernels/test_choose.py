"""Which implementation runs: by name, or by device and dtype."""

import logging

import pytest

from pallas_kernels import KernelError, choose
from pallas_kernels.choose import implementation


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(choose, "platform", lambda: "gpu")


def test_auto_takes_the_kernel_on_a_gpu_in_16_bits(on_gpu):
    assert implementation("block_attention", "auto", "bfloat16", None) == "gpu"
    assert implementation("block_attention", "auto", "float32", None) == "reference"
    assert implementation("block_attention", "reference", "bfloat16", None) == "reference"


def test_auto_says_once_why_it_falls_back(on_gpu, caplog):
    choose._tell.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert implementation("op", "auto", "bfloat16", "width 24") == "reference"
    assert [record.message for record in caplog.records] == [
        "op: reference instead of the GPU kernel: width 24"
    ]


def test_a_name_never_falls_back(on_gpu, monkeypatch):
    with pytest.raises(KernelError, match="op: kernels 'gpu' cannot run: width 24; use auto"):
        implementation("op", "gpu", "bfloat16", "width 24")
    monkeypatch.setattr(choose, "platform", lambda: "cpu")
    with pytest.raises(KernelError, match="the default device is a cpu"):
        implementation("op", "gpu", "bfloat16", None)
    assert implementation("op", "interpret", "float32", None) == "interpret"
