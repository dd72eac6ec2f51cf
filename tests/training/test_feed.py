"""Order and state of training batches."""

import numpy as np
import pytest

from mmflash_jax.training.data import Row
from mmflash_jax.training.feed import batches
from mmflash_jax.weights.hf_config import ConfigError


def numbered(count: int) -> list[Row]:
    """Rows of five tokens; the last two are the row's number."""
    places = np.arange(5, dtype=np.int32)
    return [
        Row(
            ids=np.array([1, 2, 3, index, index], np.int32),
            media_idx=np.full(5, -1, np.int32),
            positions=np.stack([places] * 3),
            media=np.zeros((0, 4), np.float32),
            prompt_len=3,
            weight=np.ones(5, np.float32),
            score=np.full(5, np.nan, np.float32),
        )
        for index in range(count)
    ]


def numbers(source, steps: int) -> list[list[int]]:
    return [next(source)["ids"][:, 3].tolist() for _ in range(steps)]


def drawn(seed: int, steps: int = 5) -> list[list[int]]:
    return numbers(batches(numbered(6), 3, 8, seed), steps)


def test_every_epoch_holds_every_row_once_in_a_new_order():
    order = drawn(0, 8)
    epochs = [order[at] + order[at + 1] for at in range(0, 8, 2)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_order_follows_from_the_seed():
    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


@pytest.mark.parametrize("taken", [0, 1, 4, 9])
def test_a_restored_iterator_goes_on_at_the_same_batch(taken):
    """Batches made ahead by the threads do not count as taken; epochs are passed."""
    whole = drawn(0, taken + 5)
    source = batches(numbered(6), 3, 8, 0)
    numbers(source, taken)
    later = batches(numbered(6), 3, 8, 0)
    later.set_state(source.get_state())
    assert numbers(later, 5) == whole[taken:]


def test_too_few_rows_for_a_batch():
    with pytest.raises(ConfigError, match=r"2 training rows do not fill the 3 rows of a step"):
        batches(numbered(2), 3, 8, 0)
