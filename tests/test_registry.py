"""Short names, folders and hub ids."""

import pytest

from mmflash_jax import registry
from mmflash_jax.registry import CheckpointNotFoundError, Pair, pair


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two checkpoint folders under the short name `mine`."""
    for name in ("target", "draft", "other"):
        (tmp_path / name).mkdir()
    mine = Pair(str(tmp_path / "target"), str(tmp_path / "draft"))
    monkeypatch.setitem(registry.PAIRS, "mine", mine)
    return tmp_path


def test_a_short_name_brings_its_draft(folders):
    assert pair("mine", None) == (folders / "target", folders / "draft")


def test_a_draft_may_be_replaced_or_left_out(folders):
    assert pair("mine", "none") == (folders / "target", None)
    assert pair("mine", str(folders / "other")) == (folders / "target", folders / "other")


def test_a_folder_has_no_draft_of_its_own(folders):
    target, other = folders / "target", folders / "other"
    assert pair(str(target), None) == (target, None)
    assert pair(str(target), str(other)) == (target, other)


@pytest.mark.parametrize("name", ["no-such-name", "no/such", "not a/valid//id"])
def test_an_unknown_name_lists_what_there_is(name):
    """The hub is offline in tests: one message names all three readings of the name."""
    with pytest.raises(CheckpointNotFoundError) as error:
        pair(name, None)
    message = str(error.value)
    assert repr(name) in message
    assert "demo" in message
    assert "no folder" in message
    assert "\n" not in message
