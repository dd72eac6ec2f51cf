"""From a request (text, images, chat messages or token ids) to a `Prompt` for the device.

Everything that words depend on is the checkpoint's own: tokenizer, chat template, image processor.
The target adds its image placeholder, its vocabulary and its rule of positions. Needs neither
torch nor torchvision.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jinja2
import numpy as np
from transformers import AutoTokenizer

# Not from the package itself: transformers 5.17 hides the name there where torchvision is missing.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from mmflash_jax.decode.adjust import NEUTRAL, Adjustment
from mmflash_jax.decode.records import PatchedImage, Prompt
from mmflash_jax.decode.sampling import GREEDY, SamplingSettings
from mmflash_jax.engine.images import Source, open_image
from mmflash_jax.weights.hf_config import read_json

Message = Mapping[str, Any]


class PromptError(ValueError):
    """A request cannot be answered as it is; the message says what to change."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. Exactly one of `text` (with or without `images`), `messages` and `ids`.

    id: the caller's own name for it.
    text: one user message; `images` stand before it, in order.
    messages: a whole chat in the chat template's form; each `{"type": "image"}` part takes the
        next of `images`.
    ids: a tokenised prompt, with one placeholder an image or with all of them.
    images: files, file contents, images that stay in a file of prompts, or PIL images.
    max_tokens: most tokens to generate.
    stop: strings that end the answer; the text returned ends before them.
    sampling: how its tokens are chosen.
    adjustment: what is done to the logits before.
    logprobs: whether log-probabilities are asked for.
    """

    id: str = ""
    text: str | None = None
    messages: Sequence[Message] | None = None
    ids: Sequence[int] | None = None
    images: Sequence[Source] = ()
    max_tokens: int = 256
    stop: Sequence[str] = ()
    sampling: SamplingSettings = GREEDY
    adjustment: Adjustment = NEUTRAL
    logprobs: bool = False


class PromptTarget(Protocol):
    """What encoding asks of a target: a part of `targets.base.Target`."""

    @property
    def config(self) -> Any: ...

    @property
    def image_side(self) -> int: ...

    @property
    def image_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]: ...

    @property
    def image_settings(self) -> Mapping[str, Any]: ...

    def unpack_image(self, made: Mapping[str, Any]) -> tuple[np.ndarray, int, int]: ...

    def prompt_positions(
        self, ids: np.ndarray, grids: Sequence[tuple[int, int]]
    ) -> tuple[np.ndarray, int]: ...


@dataclass(frozen=True)
class PromptEncoder:
    """Requests to prompts and generated ids to text, by one checkpoint's rules.

    unsupported_ids: name and id of placeholders that no tower here can fill.
    thinking: the chat template's `enable_thinking`; None leaves it to the template.
    """

    tokenizer: Any
    image_processor: Any
    target: PromptTarget
    unsupported_ids: Mapping[str, int]
    thinking: bool | None = None

    @classmethod
    def from_checkpoint(
        cls, folder: str | Path, target: PromptTarget, *, thinking: bool | None = None
    ) -> "PromptEncoder":
        """The front end that lies beside a checkpoint's weights.

        Raises:
            PromptError: it has no chat template, or its image processor and its image tower cut
                patches differently.
        """
        folder = Path(folder)
        # The PIL backend: torchvision's resizes differently and would need torch.
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if tokenizer.chat_template is None:
            raise PromptError(f"{folder} has no chat template (chat_template.jinja)")
        config = read_json(folder / "config.json")
        _check_patches(processor, target.image_settings)
        names = ("video_token_id", "audio_token_id")
        return cls(
            tokenizer=tokenizer,
            image_processor=processor,
            target=target,
            unsupported_ids={name: config[name] for name in names if config.get(name) is not None},
            thinking=thinking,
        )

    @property
    def eos_id(self) -> int | None:
        """The id that ends a turn."""
        return self.tokenizer.eos_token_id

    # Cached: the tokenizer makes its whole table anew for each call.
    @functools.cached_property
    def vocabulary(self) -> int:
        """Ids from 0 that hold every token of the tokenizer, added ones included."""
        largest = max(self.tokenizer.get_vocab().values())
        return min(largest + 1, self.target.config.vocab_size)

    def token_id(self, token: str) -> int:
        """The id of one token, written as the tokenizer's table has it.

        Raises:
            PromptError: the tokenizer has no such token.
        """
        table = self.tokenizer.get_vocab()
        if token not in table:
            raise PromptError(f"the tokenizer has no token {token!r}")
        return int(table[token])

    def encode(self, request: Request) -> Prompt:
        """The prompt of a request: text rendered, images cut into patches, positions set.

        Raises:
            PromptError: nothing to answer, images and placeholders differ in number, ids outside
                the vocabulary, or the chat template refuses the messages.
            ImageError: an image cannot be read.
        """
        if request.max_tokens < 1:
            raise PromptError(f"max_tokens is {request.max_tokens}, must be at least 1")
        ids = self._checked(self._token_ids(request))
        # Counted before any image is decoded: a wrong request costs nothing.
        runs = self._placeholders(ids, len(request.images), expanded=request.ids is not None)
        images = tuple(self._patch(request.images, index) for index in range(len(request.images)))
        ids = self._expand(ids, runs, images)
        is_media = ids == self.target.config.image_token_id
        positions, shift = self.target.prompt_positions(ids, self._grids(images))
        return Prompt(
            ids=ids,
            media_idx=np.where(is_media, np.cumsum(is_media) - 1, -1).astype(np.int32),
            positions=positions,
            rope_shift=int(shift),
            images=images,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            adjustment=request.adjustment,
            logprobs=request.logprobs,
        )

    def render(self, request: Request) -> str:
        """The text that a request of `text` or `messages` stands for, template applied.

        Raises:
            PromptError: it is empty or the chat template refuses it.
        """
        messages = _messages(request)
        options = {} if self.thinking is None else {"enable_thinking": self.thinking}
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise PromptError(f"the chat template refuses the messages: {error}") from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of generated ids, special tokens left out."""
        return self.tokenizer.decode([int(id) for id in ids], skip_special_tokens=True)

    def _token_ids(self, request: Request) -> Sequence[int]:
        if request.ids is None:
            # The template writes every special token itself.
            return self.tokenizer(self.render(request), add_special_tokens=False)["input_ids"]
        if request.text is not None or request.messages is not None:
            raise PromptError("a request holds ids or text or messages, not two of them")
        return request.ids

    def _placeholders(
        self, ids: np.ndarray, images: int, *, expanded: bool
    ) -> list[tuple[int, int]]:
        """(start, count) of the placeholders of each image; counts above 1 if `expanded`."""
        places = np.flatnonzero(ids == self.target.config.image_token_id)
        if len(places) == images:
            return [(int(place), 1) for place in places]
        groups = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []
        if expanded and len(groups) == images:
            return [(int(group[0]), len(group)) for group in groups]
        raise PromptError(
            f"the prompt has {len(places)} image placeholders"
            + (f" in {len(groups)} runs" if expanded else "")
            + f" and the request has {images} images; each image needs one placeholder"
        )

    def _patch(self, sources: Sequence[Source], index: int) -> PatchedImage:
        """Image `index` as the checkpoint's processor resizes, normalises and cuts it."""
        source = sources[index]
        name = str(source) if isinstance(source, str | Path) else f"image {index + 1}"
        image = open_image(source, name=name)
        try:
            made = self.image_processor(images=[image], return_tensors="np")
        except ValueError as error:
            # The processor's own limits, such as the ratio of the sides.
            raise PromptError(f"{name}: {image.width} x {image.height}: {error}") from None
        patches, rows, columns = self.target.unpack_image(made)
        return PatchedImage(
            patches=patches,
            rows=rows,
            columns=columns,
            num_tokens=rows * columns // self.target.image_side**2,
        )

    def _grids(self, images: Sequence[PatchedImage]) -> list[tuple[int, int]]:
        side = self.target.image_side
        return [(image.rows // side, image.columns // side) for image in images]

    def _expand(
        self, ids: np.ndarray, runs: list[tuple[int, int]], images: Sequence[PatchedImage]
    ) -> np.ndarray:
        """The ids with as many placeholders for each image as it takes tokens, framed."""
        parts, done = [], 0
        for index, ((start, count), image) in enumerate(zip(runs, images, strict=True)):
            if count not in (1, image.num_tokens):
                raise PromptError(
                    f"image {index + 1} has {count} placeholders in ids and takes "
                    f"{image.num_tokens} tokens"
                )
            run = np.full(image.num_tokens, ids[start], np.int32)
            parts += [ids[done:start], self._framed(ids, start, count, run)]
            done = start + count
        return np.concatenate([*parts, ids[done:]])

    def _framed(self, ids: np.ndarray, start: int, count: int, run: np.ndarray) -> np.ndarray:
        """An image's run between the ids that belong around it, unless they stand there."""
        before, after = self.target.image_frame
        end = start + count
        if tuple(ids[max(start - len(before), 0) : start]) == before:
            before = ()
        if tuple(ids[end : end + len(after)]) == after:
            after = ()
        return np.concatenate([before, run, after]).astype(np.int32)

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        """The ids as int32, each one something that the target can look up or see."""
        if not len(ids):
            raise PromptError("the prompt has no tokens")
        vocabulary, image_id = self.target.config.vocab_size, self.target.config.image_token_id
        unsupported = {id: name for name, id in self.unsupported_ids.items()}
        for id in ids:
            if not isinstance(id, int | np.integer) or isinstance(id, bool):
                raise PromptError(f"ids holds {id!r}, expected integers")
            # The image placeholder may lie outside: features take its place before any look-up.
            if not 0 <= id < vocabulary and id != image_id:
                raise PromptError(f"token id {id} is outside the vocabulary of {vocabulary}")
            if id in unsupported:
                kind = unsupported[int(id)].removesuffix("_token_id")
                raise PromptError(
                    f"the prompt holds {kind} (token {id}); only images are supported"
                )
        return np.asarray(ids, np.int32)


def _messages(request: Request) -> Sequence[Message]:
    """The chat of a request that brings something to answer."""
    if request.messages is not None and request.text is not None:
        raise PromptError("a request holds ids or text or messages, not two of them")
    messages = request.messages
    if messages is None:
        parts: list[Message] = [{"type": "image"} for _ in request.images]
        if request.text:
            parts.append({"type": "text", "text": request.text})
        messages = [{"role": "user", "content": parts}]
    if not all(isinstance(message, Mapping) for message in messages):
        raise PromptError("messages must be objects with a role and a content")
    if not any(_says_something(message.get("content")) for message in messages):
        raise PromptError("the prompt is empty: it has neither text nor an image")
    return messages


def _says_something(content: Any) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    if not isinstance(content, Sequence):
        return False
    parts = [part for part in content if isinstance(part, Mapping)]
    return any(part.get("type") != "text" or str(part.get("text")).strip() for part in parts)


def _check_patches(processor: Any, needed: Mapping[str, Any]) -> None:
    for name, value in needed.items():
        cut = getattr(processor, name, None)
        if cut != value:
            raise PromptError(
                f"preprocessor_config.json: {name} is {cut}, but the image tower of config.json "
                f"needs {value}"
            )
