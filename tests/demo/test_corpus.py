"""The chart corpus: reproducible, honestly split, and its answers are right."""

import random
import re

import numpy as np
import pytest

from mmflash_jax.demo import charts, corpus, tables
from mmflash_jax.demo.reasoning import QUESTION_TYPES
from mmflash_jax.demo.wording import Reading, write_exchange


@pytest.fixture(scope="module")
def held_out_examples() -> list[corpus.ChartExample]:
    return corpus.sample_examples(600, seed=5, held_out=True)


@pytest.fixture(scope="module")
def training_examples() -> list[corpus.ChartExample]:
    return corpus.sample_examples(600, seed=5)


def test_the_same_seed_gives_the_same_examples():
    first, again = (corpus.sample_examples(20, seed=3) for _ in range(2))
    other = corpus.sample_examples(20, seed=4)
    for one, two in zip(first, again, strict=True):
        assert one.answer_text == two.answer_text
        assert one.question == two.question
        np.testing.assert_array_equal(one.image, two.image)
    assert [e.answer_text for e in first] != [e.answer_text for e in other]


def test_known_answer_of_one_seed():
    """The corpus must not drift: the shipped tokenizer and weights were made from it."""
    example = corpus.sample_examples(1, seed=3, style="ordinary")[0]
    assert example.question == "What value does the chart show for GRA?"
    assert example.answer == "32"


def test_slices_are_held_out_whole(held_out_examples, training_examples):
    kept = {f"{t.metric} {t.name}" for t in tables.load_slices(held_out=True)}
    used = {f"{t.metric} {t.name}" for t in tables.load_slices(held_out=False)}
    assert not kept & used
    assert {example.table for example in held_out_examples} <= kept
    assert {example.table for example in training_examples} <= used
    for name in used:
        assert not re.search(r"1972|2002|2014|Trebi|Glabron", name), name
    for year in (*tables.HELD_OUT_YEARS, *tables.HELD_OUT_VARIETIES):
        assert any(year in name for name in kept), year


def test_evaluation_charts_show_the_tables_as_they_are(held_out_examples):
    values = {f"{t.metric} {t.name}": t.values for t in tables.load_slices(held_out=True)}
    for example in held_out_examples:
        for label, value in zip(example.labels, example.values, strict=True):
            assert values[example.table][label] == value


def test_training_charts_are_augmented(training_examples):
    values = {f"{t.metric} {t.name}": t.values for t in tables.load_slices(held_out=False)}
    unknown = [e for e in training_examples if not set(e.labels) <= set(values[e.table])]
    assert 0.2 < len(unknown) / len(training_examples) < 0.4


def expected_answer(example: corpus.ChartExample) -> str:
    """The answer worked out from labels, values and the question's own words."""
    value_of = dict(zip(example.labels, example.values, strict=True))
    ranked = sorted(value_of, key=lambda label: value_of[label], reverse=True)
    named = [word for word in re.findall(r"[A-Z]{3}", example.question) if word in value_of]
    asked = [value_of[label] for label in named]
    answers = {
        "value": lambda: str(asked[0]),
        "max": lambda: ranked[0],
        "min": lambda: ranked[-1],
        "difference": lambda: str(abs(asked[0] - asked[1])),
        "sum": lambda: str(asked[0] + asked[1]),
        "compare": lambda: max(named, key=lambda label: value_of[label]),
        "second": lambda: ranked[1],
        "rank": lambda: ", ".join(ranked),
        "count": lambda: str(len(value_of)),
        "describe": lambda: example.metric,
    }
    return answers[example.question_type]()


def test_answers_are_right_for_every_question_type(held_out_examples, training_examples):
    seen = set()
    for example in held_out_examples + training_examples:
        seen.add(example.question_type)
        assert example.answer == expected_answer(example), example.question
        assert example.answer_text.endswith(f"Answer: {example.answer}")
        assert corpus.is_correct(example.answer_text, example)
    assert seen == set(QUESTION_TYPES)


def test_the_read_out_names_every_entity(held_out_examples):
    for example in held_out_examples:
        for label, value in zip(example.labels, example.values, strict=True):
            assert re.search(rf"\b{label} [a-z ]+ {value}\b", example.answer_text)


def test_remarks_about_the_line_are_true(training_examples):
    checked = 0
    for example in training_examples:
        for change in re.findall(r"The line (rises|falls)", example.answer_text):
            checked += 1
            assert (change == "rises") == (example.values[-1] > example.values[0])
    assert checked > 5


def test_wording_is_wide():
    reading = Reading("country", "gdp", "bar", ("FRA", "NOR", "CHL"), (72, 81, 40))
    rng = random.Random(0)
    answers = {write_exchange(reading, "max", rng).answer_text for _ in range(300)}
    assert len(answers) > 290


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("It is so. Answer: FRA", True),
        ("Answer: NOR. No. Answer: FRA", True),
        ("Answer: FRA, NOR", False),
        ("Answer: fra", False),
        ("Answer: FRA.", False),
        ("FRA", False),
        ("", False),
    ],
)
def test_is_correct_compares_what_follows_the_last_mark(text, right):
    example = corpus.sample_examples(1, seed=1)[0]
    object.__setattr__(example, "answer", "FRA")
    assert corpus.is_correct(text, example) is right


@pytest.mark.parametrize("style", charts.STYLES)
@pytest.mark.parametrize("kind", charts.KINDS)
@pytest.mark.parametrize("count", [3, 4, 5])
def test_charts_have_their_shape_and_text(style, kind, count):
    labels, values = ("FRA", "NOR", "CHL", "JPN", "USA")[:count], (7, 812, 45, 999, 3)[:count]
    image, codes = charts.render_chart(kind, "gdp", labels, values, style, random.Random(1))
    assert image.shape == (112, 160, 3)
    assert image.dtype == np.uint8
    assert codes.shape == (14, 20)
    if style == "ordinary":
        assert not codes.any()
        return
    rows = ["".join(chr(code + 32) for code in row) for row in codes]
    assert "gdp" in rows[0]
    written = " ".join(rows)
    for text in (*labels, *map(str, values)):
        assert re.search(rf"\b{text}\b", written), text


def test_styles_alternate_when_both_are_asked_for():
    styles = [example.style for example in corpus.sample_examples(4, seed=0)]
    assert styles == ["snapped", "ordinary", "snapped", "ordinary"]


def test_sources_list_every_table():
    sources = (tables.TABLES_DIR / "SOURCES.md").read_text(encoding="utf-8")
    csv_files = list(tables.TABLES_DIR.glob("*.csv"))
    assert len(csv_files) >= 3
    for path in csv_files:
        assert f"`{path.name}`" in sources
    assert sum(path.stat().st_size for path in csv_files) < 300_000
