"""Bodies of answers, whole and streamed, in the shape of OpenAI's API."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from mmflash_jax.engine.tickets import BusyError, TokenLogprobs
from mmflash_jax.server.errors import APIError
from mmflash_jax.server.generate import Generation, Piece

Tokens = Sequence[tuple[int, TokenLogprobs]]
TokenText = Callable[[Sequence[int]], str]


class ChatShape:
    """`/v1/chat/completions`: `chat.completion` and `chat.completion.chunk`."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, token_text: TokenText, likeliest: int | None):
        self._token_text, self._likeliest = token_text, likeliest

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """Choices of the chunks before any text."""
        delta = {"role": "assistant", "content": ""}
        return [self._chunk_choice(index, delta, None, None) for index in range(choices)]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return self._chunk_choice(
            piece.choice, delta, self.logprobs(piece.tokens, 0), piece.finish_reason
        )

    def choice(self, index: int, text: str, tokens: Tokens, reason: str) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self.logprobs(tokens, 0),
            "finish_reason": reason,
        }

    @staticmethod
    def _chunk_choice(index: int, delta: Any, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokens: Tokens, _: int) -> dict[str, Any] | None:
        if self._likeliest is None:
            return None
        return {
            "content": [
                self._entry(id, one.chosen)
                | {
                    "top_logprobs": [
                        self._entry(int(other), float(value))
                        for other, value in zip(one.ids, one.values, strict=True)
                    ][: self._likeliest]
                }
                for id, one in tokens
            ],
            "refusal": None,
        }

    def _entry(self, id: int, value: float) -> dict[str, Any]:
        text = self._token_text([id])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


class TextShape:
    """`/v1/completions`: `text_completion`, whole and in parts."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, token_text: TokenText, likeliest: int | None):
        self._token_text, self._likeliest = token_text, likeliest
        self._offsets: dict[int, int] = {}

    def opening(self, choices: int) -> list[dict[str, Any]]:  # noqa: ARG002
        return []

    def chunk(self, piece: Piece) -> dict[str, Any]:
        offset = self._offsets.get(piece.choice, 0)
        self._offsets[piece.choice] = offset + len(piece.text)
        return {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": self.logprobs(piece.tokens, offset),
            "finish_reason": piece.finish_reason,
        }

    def choice(self, index: int, text: str, tokens: Tokens, reason: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self.logprobs(tokens, 0),
            "finish_reason": reason,
        }

    def logprobs(self, tokens: Tokens, offset: int) -> dict[str, Any] | None:
        if self._likeliest is None:
            return None
        texts = [self._token_text([id]) for id, _ in tokens]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.chosen for _, one in tokens],
            "top_logprobs": [self._likeliest_of(one) for _, one in tokens],
            "text_offset": offsets,
        }

    def _likeliest_of(self, one: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for id, value in list(zip(one.ids, one.values, strict=True))[: self._likeliest]:
            # Several tokens may read alike; the likeliest of them stays.
            found.setdefault(self._token_text([int(id)]), float(value))
        return found


Shape = ChatShape | TextShape


def head(shape: Shape, kind: str, model: str) -> dict[str, Any]:
    """Fields that every body of one answer shares."""
    return {
        "id": f"{shape.prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


async def whole_answer(generation: Generation, shape: Shape, model: str) -> dict[str, Any]:
    """The body once every choice has ended.

    Raises:
        BusyError: the engine went down before that.
    """
    tokens: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in generation.texts]
    reasons = [""] * len(generation.texts)
    async for piece in generation.pieces():
        tokens[piece.choice] += piece.tokens
        reasons[piece.choice] = piece.finish_reason or ""
    choices = [
        shape.choice(index, text.text, tokens[index], reasons[index])
        for index, text in enumerate(generation.texts)
    ]
    body = head(shape, shape.whole, model)
    return body | {"choices": choices, "usage": generation.usage}


async def streamed_answer(
    generation: Generation, shape: Shape, model: str, *, usage: bool
) -> AsyncIterator[str]:
    """Server-sent events: a chunk for each piece, `[DONE]` at the end."""
    first = head(shape, shape.part, model)
    # With usage asked for, every chunk has the field and the last one fills it.
    first |= {"usage": None} if usage else {}
    try:
        for choice in shape.opening(len(generation.texts)):
            yield event(first | {"choices": [choice]})
        async for piece in generation.pieces():
            drafted = {"drafted": piece.drafted} if piece.drafted else {}
            yield event(first | {"choices": [shape.chunk(piece) | drafted]})
        if usage:
            yield event(first | {"choices": [], "usage": generation.usage})
    except BusyError as error:
        yield event(APIError(503, str(error)).body())
    finally:
        generation.cancel()
    yield "data: [DONE]\n\n"


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
