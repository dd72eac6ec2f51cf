"""Turns chart examples into token ids of one fixed length."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from mmflash_jax.demo.corpus import ChartExample
from mmflash_jax.demo.recipe.family import PromptMarks

SEQUENCE_LENGTH = 224  # a multiple of the delta-net chunk; the rare longer example is dropped


@dataclass(frozen=True)
class EncodedExamples:
    """`ids` int16[count, SEQUENCE_LENGTH]; an answer is ids[row, starts[row] : ends[row]]."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    fits: np.ndarray


class PromptWriter:
    """Writes the prompt that `chat_template.jinja` renders, with the picture's pads repeated."""

    def __init__(self, tokenizer: Tokenizer, marks: PromptMarks, image_tokens: int) -> None:
        self.tokenizer, self.marks, self.image_tokens = tokenizer, marks, image_tokens
        self.pad_id = tokenizer.token_to_id(marks.pad)
        self.turn_end_id = tokenizer.token_to_id(marks.turn_end)
        self.image_id = tokenizer.token_to_id(marks.image_pad)
        self._before_image = self._encode(marks.before_image + marks.image_open)
        self.prefix_length = len(self._before_image)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt_ids(self, question: str) -> list[int]:
        marks = self.marks
        after_image = self._encode(
            f"{marks.image_close}{marks.after_image}{question}{marks.after_question}"
        )
        return self._before_image + [self.image_id] * self.image_tokens + after_image

    def encode_examples(self, examples: Sequence[ChartExample]) -> EncodedExamples:
        count = len(examples)
        ids = np.full((count, SEQUENCE_LENGTH), self.pad_id, np.int16)
        starts, ends = np.zeros(count, np.int16), np.zeros(count, np.int16)
        fits = np.ones(count, bool)
        for row, example in enumerate(examples):
            prompt = self.prompt_ids(example.question)
            whole = [*prompt, *self._encode(example.answer_text), self.turn_end_id]
            fits[row] = len(whole) <= SEQUENCE_LENGTH
            whole = whole[:SEQUENCE_LENGTH]
            ids[row, : len(whole)] = whole
            starts[row], ends[row] = len(prompt), len(whole)
        return EncodedExamples(ids, starts, ends, fits)

    def decode_answer(self, ids: Sequence[int]) -> str:
        """Text up to the end of the turn."""
        ids = list(ids)
        if self.turn_end_id in ids:
            ids = ids[: ids.index(self.turn_end_id)]
        return self.tokenizer.decode(ids)
