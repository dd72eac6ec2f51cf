"""The demo target with a random draft."""

from pathlib import Path

import pytest

from mmflash_jax.registry import DEMO
from tests.drafts import random_draft


@pytest.fixture(scope="session")
def demo_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft for the demo target."""
    return random_draft(tmp_path_factory.mktemp("draft"), DEMO / "qwen35")
