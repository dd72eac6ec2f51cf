"""The demo target knows which of its words it reads from the chart, and the scores show it."""

import re
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from mmflash_jax.config_train import VisualConfig
from mmflash_jax.decode.records import Plan
from mmflash_jax.demo.corpus import ChartExample, sample_examples
from mmflash_jax.drafters import NoDraft
from mmflash_jax.engine.prompts import PromptEncoder, Request
from mmflash_jax.load import load_target
from mmflash_jax.registry import pair
from mmflash_jax.training.ablation import ablate
from mmflash_jax.training.divergence import score_answers
from mmflash_jax.training.token_weights import token_weights

CHARTS = 6
FUNCTION_WORDS = {"is", "at", "to", "then", "and", "by", "of", "the", "are", "it", "Answer"}


class Token(NamedTuple):
    """A token of an answer, whether it is the first mention of a label or value, and its score."""

    text: str
    read: bool
    score: float
    weight: float


@pytest.fixture(scope="module")
def tokens() -> list[Token]:
    """Of worked answers to held-out charts: what the target was trained to say."""
    folder, _ = pair("demo", "none")
    target, params = load_target(folder, "float32")
    encoder = PromptEncoder.from_checkpoint(folder, target)
    examples = sample_examples(CHARTS, seed=5, held_out=True)
    requests = [
        Request(id=str(n), text=example.question, images=(Image.fromarray(example.image),))
        for n, example in enumerate(examples)
    ]
    made = [encoder.tokenizer(e.answer_text, return_offsets_mapping=True) for e in examples]
    scored = score_answers(
        Plan(target, NoDraft(), ()), params,
        [encoder.encode(request) for request in requests],
        [encoder.encode(ablate(request, "blank", 0)) for request in requests],
        [answer["input_ids"] for answer in made],
        rows=CHARTS, vocabulary=len(encoder.tokenizer), cap=10.0,
    )  # fmt: skip
    found = []
    for example, answer, (score, sure) in zip(examples, made, scored, strict=True):
        weight = token_weights(score, sure, np.ones(len(score), bool), VisualConfig())
        places = first_mentions(example)
        for (start, end), nats, value in zip(answer["offset_mapping"], score, weight, strict=True):
            text = example.answer_text[start:end].strip()
            read = bool(text) and any(start >= low and end <= high for low, high in places)
            found.append(Token(text, read, float(nats), float(value)))
    return found


def first_mentions(example: ChartExample) -> list[tuple[int, int]]:
    names = [*example.labels, *map(str, example.values)]
    found = [re.search(rf"\b{re.escape(name)}\b", example.answer_text) for name in names]
    return [match.span() for match in found if match]


def scores_of(tokens: list[Token]) -> np.ndarray:
    return np.array([token.score for token in tokens])


def test_what_is_read_has_the_largest_scores(tokens):
    """Check (g). A few function words do show vision: "is" stands where "peaks" would, and a comma
    where "and" would, so their typical score is near zero and their mean is not."""
    digits = scores_of([token for token in tokens if token.read and token.text.isdigit()])
    letters = scores_of([token for token in tokens if token.read and token.text.isalpha()])
    words = scores_of([token for token in tokens if token.text in FUNCTION_WORDS])
    assert min(len(digits), len(letters), len(words)) > 20
    assert digits.mean() > 2
    assert letters.mean() > 2
    assert np.median(words) < 0.01
    assert words.mean() < min(digits.mean(), letters.mean()) / 4
    # A quarter of all tokens are read.
    ranked = sorted(tokens, key=lambda token: -token.score)[: len(tokens) // 5]
    assert np.mean([token.read for token in ranked]) > 0.65


def test_weights_move_to_what_is_read(tokens):
    read = np.mean([token.weight for token in tokens if token.read])
    words = np.mean([token.weight for token in tokens if token.text in FUNCTION_WORDS])
    assert read > 1.5
    assert words < 0.9
