"""From a body to prompts in the engine, and from the engine's updates to pieces of text."""

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmflash_jax.config import SamplingSettings
from mmflash_jax.decode.adjust import Adjustment
from mmflash_jax.decode.records import Prompt
from mmflash_jax.engine.prompts import PromptEncoder, PromptError, Request
from mmflash_jax.engine.serving import Engine
from mmflash_jax.engine.text import AnswerText
from mmflash_jax.engine.tickets import BusyError, Ticket, TokenLogprobs, Update
from mmflash_jax.server.errors import APIError
from mmflash_jax.server.fetch import Fetcher
from mmflash_jax.server.images import ImageLimits, is_http, read_image
from mmflash_jax.server.schema import ChatRequest, CompletionRequest, ImagePart, TextPart

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What holds for requests that do not say otherwise."""

    max_tokens: int
    sampling: SamplingSettings


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a choice gained: text to show, log-probabilities of the tokens behind it.

    drafted: the text token by token, and whether each was an accepted draft, if asked for.
    finish_reason: with the last piece of a choice.
    """

    choice: int
    text: str
    tokens: tuple[tuple[int, TokenLogprobs], ...] = ()
    drafted: tuple[tuple[str, bool], ...] = ()
    finish_reason: str | None = None


async def fetch_images(
    body: ChatRequest, limits: ImageLimits, fetcher: Fetcher | None
) -> dict[str, bytes]:
    """The images of a chat that have http(s) addresses, by address; none without a fetcher.

    Raises:
        ImageError: one cannot be fetched.
        APIError: too many images.
    """
    parts = [part for message in body.messages for part in message.parts]
    urls = [part.image_url.url for part in parts if isinstance(part, ImagePart)]
    if len(urls) > limits.count:
        raise APIError(400, f"more than {limits.count} images", param="messages")
    if fetcher is None:
        return {}
    wanted = {url: f"image {place}" for place, url in enumerate(urls, start=1) if is_http(url)}
    fetches = (fetcher.fetch(url, name) for url, name in wanted.items())
    return dict(zip(wanted, await asyncio.gather(*fetches), strict=True))


def chat_request(
    body: ChatRequest, limits: ImageLimits, fetched: Mapping[str, bytes]
) -> tuple[Request, bool | None]:
    """The request of a chat, and whether the model should think first.

    Raises:
        ImageError: an image cannot be taken.
    """
    images: list[bytes] = []
    messages: list[dict[str, Any]] = []
    for message in body.messages:
        content: Any = message.content if message.content is not None else ""
        if not isinstance(content, str):
            content = [_template_part(part, images, limits, fetched) for part in content]
        messages.append({"role": message.role, "content": content})
    thinking = body.chat_template_kwargs.enable_thinking if body.chat_template_kwargs else None
    return Request(messages=messages, images=tuple(images)), thinking


def _template_part(
    part: TextPart | ImagePart,
    images: list[bytes],
    limits: ImageLimits,
    fetched: Mapping[str, bytes],
) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    name = f"image {len(images) + 1}"
    images.append(read_image(part.image_url.url, limits, name=name, fetched=fetched))
    return {"type": "image"}


def completion_requests(body: CompletionRequest, encoder: PromptEncoder) -> list[Request]:
    """A request for each prompt; text is tokenised as it stands, without a chat template."""
    return [
        Request(ids=encoder.tokenizer(one)["input_ids"] if isinstance(one, str) else one)
        for one in body.prompts
    ]


def encode(
    body: ChatRequest | CompletionRequest,
    request: Request,
    encoder: PromptEncoder,
    defaults: Defaults,
    capacity: int,
) -> Prompt:
    """The prompt of a request, with everything that the body says about its answer."""
    settings = defaults.sampling
    given = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    # vLLM writes "all tokens" as -1.
    if given["top_k"] == -1:
        given["top_k"] = 0
    seed = secrets.randbits(64) if body.seed is None else body.seed % 2**64
    chosen = {name: value for name, value in given.items() if value is not None}
    request = dataclasses.replace(
        request,
        max_tokens=1,
        sampling=dataclasses.replace(settings, seed=seed, **chosen),
        adjustment=_adjustment(body, encoder),
        logprobs=body.likeliest is not None,
    )
    prompt = encoder.encode(request)
    wanted = body.most_tokens
    if wanted is None:
        # Without a wish an answer may be as long as there is room; a prompt that leaves none is
        # refused by the engine, with the numbers.
        wanted = max(1, min(defaults.max_tokens, capacity - len(prompt.ids)))
    return dataclasses.replace(prompt, max_tokens=wanted)


def _adjustment(body: ChatRequest | CompletionRequest, encoder: PromptEncoder) -> Adjustment:
    vocabulary = encoder.target.config.vocab_size
    biases = []
    for key, value in (body.logit_bias or {}).items():
        if not key.isascii() or not key.isdigit() or not int(key) < vocabulary:
            raise PromptError(f"logit_bias: {key!r} is no token id from 0 to {vocabulary - 1}")
        biases.append((int(key), value))
    given = {
        name: getattr(body, name)
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
    }
    penalties = {name: value for name, value in given.items() if value is not None}
    return Adjustment(**penalties, logit_bias=tuple(sorted(biases)))


class Generation:
    """All choices of one HTTP request on their way through the engine.

    Prompts come one after another; each is answered `n` times. Choice i of n with a seed draws
    with seed + i, so the first one is what a request for a single choice gets.
    """

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Prompt],
    ):
        self.prompts = prompts
        self._engine = engine
        self._by_token = bool(body.return_drafted)
        n = body.n or 1
        self.texts = [
            AnswerText(encoder.decode, stops=body.stops, stop_ids=body.stop_token_ids or ())
            for _ in range(n * len(prompts))
        ]
        self._last: list[Update | None] = [None] * len(self.texts)
        self._kept = 0
        self._queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._noted: list[list[tuple[int, TokenLogprobs, int]]] = [[] for _ in self.texts]
        self._choices = [
            dataclasses.replace(
                prompt,
                sampling=dataclasses.replace(
                    prompt.sampling, seed=(prompt.sampling.seed + index) % 2**64
                ),
            )
            for prompt in prompts
            for index in range(n)
        ]

    def submit(self) -> None:
        """Queue every choice, or none.

        Raises:
            RefusedError, BusyError: as `Engine.submit`.
        """
        if len(self._choices) > self._engine.queue:
            raise APIError(
                400, f"{len(self._choices)} choices, the queue holds {self._engine.queue}"
            )
        loop = asyncio.get_running_loop()

        def receiver(choice: int) -> Any:
            def receive(update: Update) -> None:
                loop.call_soon_threadsafe(self._queue.put_nowait, (choice, update))

            return receive

        try:
            for choice, prompt in enumerate(self._choices):
                self._tickets.append(self._engine.submit(prompt, receiver(choice)))
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Free what still runs."""
        for ticket in self._tickets:
            self._engine.cancel(ticket)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come; whatever ends this frees the slots.

        Raises:
            BusyError: the engine went down before the end.
        """
        left = set(range(len(self.texts)))
        try:
            while left:
                choice, update = await self._queue.get()
                if choice not in left:
                    continue
                if update.error is not None:
                    raise BusyError(update.error)
                self._last[choice] = update
                self._kept += sum(update.drafted)
                piece = self._piece(choice, update)
                if piece.finish_reason is not None:
                    left.discard(choice)
                    self._engine.cancel(self._tickets[choice], piece.finish_reason)
                if piece.text or piece.tokens or piece.drafted or piece.finish_reason:
                    yield piece
        finally:
            self.cancel()

    def _piece(self, choice: int, update: Update) -> Piece:
        text, last = self.texts[choice], update.finish_reason is not None
        if not update.logprobs and not self._by_token:
            shown = text.push(update.ids, last=last)
            return Piece(choice=choice, text=shown, finish_reason=_reason(text, update))
        parts: list[tuple[str, bool]] = []
        for place, id in enumerate(update.ids):
            shown = text.push([id], last=last and place == len(update.ids) - 1)
            parts.append((shown, update.drafted[place]))
            if update.logprobs:
                end = len(text.text) + text.held
                self._noted[choice].append((id, update.logprobs[place], end))
            if text.ended:
                break
        return Piece(
            choice=choice,
            text="".join(shown for shown, _ in parts),
            tokens=self._settled(choice),
            drafted=tuple(parts) if self._by_token else (),
            finish_reason=_reason(text, update),
        )

    def _settled(self, choice: int) -> tuple[tuple[int, TokenLogprobs], ...]:
        """Tokens whose text is out: a stop string shows in no list of tokens either."""
        text, noted = self.texts[choice], self._noted[choice]
        ready = [(id, one) for id, one, end in noted if end <= len(text.text)]
        self._noted[choice] = noted[len(ready) :]
        return tuple(ready)

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and answers; prompts count once, however many choices they have."""
        prompt = sum(len(one.ids) for one in self.prompts)
        images = sum(image.num_tokens for one in self.prompts for image in one.images)
        completion = sum(len(text.ids) for text in self.texts)
        last = [update for update in self._last if update is not None]
        drafted = sum(update.steps * (len(update.committed) - 1) for update in last)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": images},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._kept,
                "rejected_prediction_tokens": drafted - self._kept,
            },
        }


def _reason(text: AnswerText, update: Update) -> str | None:
    return "stop" if text.ended else update.finish_reason
