"""Free-running greedy decoding of held-out charts, and how predictable the answers' tokens are."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from mmflash_jax.demo.charts import STYLES, Style
from mmflash_jax.demo.corpus import ChartExample, is_correct, sample_examples
from mmflash_jax.demo.recipe.graphs import capture
from mmflash_jax.demo.recipe.network import TargetNetwork
from mmflash_jax.demo.recipe.prompts import SEQUENCE_LENGTH, PromptWriter

Picture = Literal["image", "white", "grey", "swapped"]
PICTURES: tuple[Picture, ...] = ("image", "white", "grey", "swapped")
UNSURE_BELOW = 0.9
_BLANK_LEVEL = {"white": 255, "grey": 128}
_SEED = 4242


def shown_images(examples: Sequence[ChartExample], picture: Picture) -> np.ndarray:
    """The pictures to show: each example's own, a blank one, or that of another example."""
    images = np.stack([example.image for example in examples])
    if picture == "swapped":
        # The sampler is random, so the neighbour is a chart of its own.
        return np.roll(images, 1, axis=0)
    return images if picture == "image" else np.full_like(images, _BLANK_LEVEL[picture])


def count_read(text: str, example: ChartExample) -> int:
    """How many of the chart's entities the read-out pairs with the right value."""
    pairs = zip(example.labels, example.values, strict=True)
    return sum(bool(re.search(rf"\b{label} [a-z ]+ {value}\b", text)) for label, value in pairs)


class Evaluator:
    """Decodes batches of a fixed size without a cache, all shapes static."""

    def __init__(
        self,
        network: TargetNetwork[Any],
        writer: PromptWriter,
        batch: int,
        count: int,
        decode_limit: int,
    ) -> None:
        self.network, self.writer, self.batch = network, writer, batch
        self.decode_limit = decode_limit
        self.examples: dict[Style, list[ChartExample]] = {
            style: self._fitting_examples(count, _SEED + index, style)
            for index, style in enumerate(STYLES)
        }
        shape, device = network.shape, network.device
        self._ids = torch.zeros(batch, SEQUENCE_LENGTH, dtype=torch.long, device=device)
        self._next = torch.full((batch,), 100, dtype=torch.long, device=device)
        self._features = torch.zeros(batch, shape.image_tokens, shape.width, device=device)
        self._images = torch.zeros(
            (batch, shape.image_height, shape.image_width, 3), dtype=torch.uint8, device=device
        )

    def prepare(self, use_graph: bool) -> None:
        self._step = capture(self._decode_one, use_graph)

    def _fitting_examples(self, count: int, seed: int, style: Style) -> list[ChartExample]:
        examples = sample_examples(count + count // 8 + 8, seed, style=style, held_out=True)
        fits = self.writer.encode_examples(examples).fits
        return [example for example, fit in zip(examples, fits, strict=True) if fit][:count]

    def _decode_one(self) -> None:
        # Gradients stay on so that the compiled training kernels serve here too.
        hidden = self.network.text(self._ids, self._features).detach()
        rows = torch.arange(self.batch, device=self.network.device)
        place = self._next.clamp(max=SEQUENCE_LENGTH - 1)
        chosen = self.network.logits(hidden[rows, place - 1]).detach().argmax(-1)
        kept = torch.where(self._next < SEQUENCE_LENGTH, chosen, self._ids[rows, place])
        self._ids.scatter_(1, place[:, None], kept[:, None])
        self._next.add_(1)

    def _show(self, examples: Sequence[ChartExample], picture: Picture) -> None:
        self._images.copy_(torch.from_numpy(shown_images(examples, picture)))
        self._features.copy_(self.network.vision(self._images).detach())

    def decode(self, examples: Sequence[ChartExample], picture: Picture) -> list[str]:
        """Greedy answers to one batch of examples."""
        encoded = self.writer.encode_examples(examples)
        starts = torch.from_numpy(encoded.starts).long()
        ids = torch.from_numpy(encoded.ids).long()
        is_answer = torch.arange(SEQUENCE_LENGTH)[None] >= starts[:, None]
        self._ids.copy_(ids.masked_fill(is_answer, self.writer.pad_id))
        self._next.copy_(starts)
        self._show(examples, picture)
        for _ in range(min(self.decode_limit, SEQUENCE_LENGTH - int(starts.min()))):
            self._step()
        decoded = self._ids.cpu().numpy()
        return [
            self.writer.decode_answer(row[start:].tolist())
            for row, start in zip(decoded, encoded.starts, strict=True)
        ]

    def accuracy(self, style: Style, picture: Picture, count: int) -> dict[str, Any]:
        """Shares of right final answers (also by question and kind) and of rightly read pairs."""
        outcomes: dict[str, list[bool]] = defaultdict(list)
        read = pairs = 0
        sample = ""
        examples = self.examples[style][:count]
        for first in range(0, len(examples), self.batch):
            batch = examples[first : first + self.batch]
            texts = self.decode(batch, picture)
            sample = sample or f"{batch[0].question} | {texts[0]} | expected {batch[0].answer}"
            for example, text in zip(batch, texts, strict=True):
                right = is_correct(text, example)
                for key in ("all", example.question_type, example.kind):
                    outcomes[key].append(right)
                read += count_read(text, example)
                pairs += len(example.labels)
        shares = {key: round(float(np.mean(rights)), 4) for key, rights in outcomes.items()}
        return {
            "style": style,
            "picture": picture,
            "count": len(examples),
            "accuracy": shares.pop("all"),
            "read": round(read / pairs, 4),
            "by": dict(sorted(shares.items())),
            "sample": sample,
        }

    def unsure_tokens(self, style: Style) -> dict[str, Any]:
        """Share of the corpus answers' tokens whose top probability is under 0.9, by class."""
        top_by_class: dict[str, list[float]] = defaultdict(list)
        for first in range(0, len(self.examples[style]), self.batch):
            batch = self.examples[style][first : first + self.batch]
            encoded = self.writer.encode_examples(batch)
            ids = torch.from_numpy(encoded.ids).long()
            self._ids.copy_(ids)
            self._show(batch, "image")
            top = self._top_probabilities()
            for row in range(self.batch):
                for place in range(encoded.starts[row], encoded.ends[row]):
                    token = self.writer.tokenizer.id_to_token(int(ids[row, place])) or ""
                    top_by_class[token_class(token)].append(float(top[row, place - 1]))
        everything = [value for values in top_by_class.values() for value in values]
        return {
            "style": style,
            "all": _unsure_share(everything),
            **{name: _unsure_share(values) for name, values in sorted(top_by_class.items())},
        }

    def _top_probabilities(self) -> Tensor:
        hidden = self.network.text(self._ids, self._features).detach()
        with torch.no_grad():
            return self.network.logits(hidden).softmax(-1).amax(-1).cpu()


def token_class(token: str) -> str:
    """Digits and capital letters come from the picture; the rest is wording."""
    if token.isdigit():
        return "digits"
    # The byte-level piece for a space, "Ġ", is an upper-case letter too.
    is_capital = len(token) == 1 and token.isascii() and token.isupper()
    return "letters" if is_capital else "other"


def _unsure_share(top_probabilities: Sequence[float]) -> dict[str, float]:
    values = np.asarray(top_probabilities)
    return {"tokens": len(values), "unsure": round(float((values < UNSURE_BELOW).mean()), 4)}
