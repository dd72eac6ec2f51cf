"""A small random pair."""

import pytest

from tests.drafts import random_draft, two_layer_target


@pytest.fixture(scope="session")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a two-layer random target and of a random draft for it."""
    target = two_layer_target(tmp_path_factory.mktemp("target"))
    draft = random_draft(tmp_path_factory.mktemp("draft"), target)
    return {"target": str(target), "draft": str(draft)}
