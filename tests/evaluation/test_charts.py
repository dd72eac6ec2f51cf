"""The held-out chart evaluation, on a handful of charts."""

import numpy as np
import pytest

from mmflash_jax.config import ServeConfig
from mmflash_jax.demo.corpus import sample_examples
from mmflash_jax.evaluation import charts
from mmflash_jax.evaluation.batch import load


def test_figures_of_one_style():
    examples = sample_examples(4, 20, "ordinary", held_out=True)
    # Shapes of the test of the bundled samples, whose compiled programs serve here too.
    arguments = charts.Arguments(count=4, batch=4, max_tokens=256)
    figures = charts.evaluate_style(load(ServeConfig()), examples, arguments)
    assert figures["parity"] is True
    assert figures["rows_equal"] == 4
    assert figures["tau"] == pytest.approx(1 + sum(figures["accepted_per_position"]))
    assert figures["tau"] > 2.5
    assert 60 < figures["mean_answer_tokens"] < 128
    assert figures["accuracy_image"] >= 0.75
    for blind in ("grey", "white", "swapped"):
        assert figures[f"accuracy_{blind}"] <= 0.5


def test_what_is_shown_instead_of_the_picture():
    examples = sample_examples(6, 3, held_out=True)
    for index, example in enumerate(examples):
        shown = {
            kind: np.asarray(charts._picture(examples, index, kind)) for kind in charts.PICTURES
        }
        assert (shown["image"] == example.image).all()
        assert set(np.unique(shown["grey"])) == {128}
        assert set(np.unique(shown["white"])) == {255}
        others = [other.image for other in examples if other is not example]
        assert any((shown["swapped"] == other).all() for other in others)
        assert {image.shape for image in shown.values()} == {example.image.shape}
