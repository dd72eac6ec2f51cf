"""The HTTP application: routes of OpenAI's API, health and metrics."""

import asyncio
import contextlib
import functools
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmflash_jax.decode.records import Prompt
from mmflash_jax.engine.images import ImageError
from mmflash_jax.engine.prompts import PromptEncoder, PromptError
from mmflash_jax.engine.serving import Engine
from mmflash_jax.engine.tickets import BusyError, RefusedError
from mmflash_jax.server.answers import ChatShape, Shape, TextShape, streamed_answer, whole_answer
from mmflash_jax.server.errors import APIError, from_validation
from mmflash_jax.server.fetch import Fetcher
from mmflash_jax.server.generate import (
    Defaults,
    Generation,
    chat_request,
    completion_requests,
    encode,
    fetch_images,
)
from mmflash_jax.server.images import ImageLimits
from mmflash_jax.server.schema import ChatRequest, CompletionRequest

PAGE = Path(__file__).with_name("page.html")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Everything that the routes need.

    model: the name that clients call it by.
    patience_s: how long running answers may go on once the server is told to stop.
    stuck_s: a loop that has not finished a turn for so long is reported as unhealthy.
    """

    engine: Engine
    encoder: PromptEncoder
    model: str
    defaults: Defaults
    images: ImageLimits
    api_key: str | None = None
    patience_s: float = 10.0
    stuck_s: float = 60.0

    @property
    def most_body_bytes(self) -> int:
        """A request with as many images of the largest size as are allowed, in base64."""
        return 2**20 + self.images.count * (self.images.most_bytes * 4 // 3 + 1024)


def make_app(site: Site) -> FastAPI:
    """The application; it starts the engine with itself and stops it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        site.engine.start()
        yield
        await asyncio.to_thread(site.engine.stop, site.patience_s)

    app = FastAPI(title="mmflash-jax", lifespan=lifespan)
    _add_errors(app, site)
    _add_completions(app, site)
    _add_status(app, site)
    app.add_middleware(_Gate, site=site)
    return app


def _add_errors(app: FastAPI, site: Site) -> None:
    def answer(error: APIError) -> JSONResponse:
        site.engine.metrics.refused(error.status)
        return error.response()

    @app.exception_handler(APIError)
    async def api_error(_: Request, error: APIError) -> JSONResponse:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> JSONResponse:
        return answer(from_validation(error))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return answer(APIError(error.status_code, str(error.detail)))

    @app.exception_handler(PromptError)
    @app.exception_handler(ImageError)
    async def bad_prompt(_: Request, error: ValueError) -> JSONResponse:
        return answer(APIError(400, str(error)))

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> JSONResponse:
        return answer(APIError(400, str(error), code="context_length_exceeded"))

    @app.exception_handler(BusyError)
    async def busy(_: Request, error: BusyError) -> JSONResponse:
        return answer(APIError(503, str(error)))


def _add_completions(app: FastAPI, site: Site) -> None:
    # Tokenizers and image processors are not safe to use from several threads at once.
    front = ThreadPoolExecutor(1, thread_name_prefix="front")
    capacity = site.engine.shape.capacity

    async def off_loop(work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(front, work)

    fetcher = None
    if site.images.fetch_s is not None:
        fetcher = Fetcher(most_bytes=site.images.most_bytes, seconds=site.images.fetch_s)

    def chat_prompts(body: ChatRequest, fetched: dict[str, bytes]) -> list[Prompt]:
        request, thinking = chat_request(body, site.images, fetched)
        encoder = site.encoder if thinking is None else replace(site.encoder, thinking=thinking)
        return [encode(body, request, encoder, site.defaults, capacity)]

    def text_prompts(body: CompletionRequest) -> list[Prompt]:
        requests = completion_requests(body, site.encoder)
        return [encode(body, one, site.encoder, site.defaults, capacity) for one in requests]

    async def respond(
        http: Request, body: ChatRequest | CompletionRequest, prompts: list[Prompt], shape: Shape
    ) -> Response:
        generation = Generation(site.engine, site.encoder, body, prompts)
        generation.submit()
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = streamed_answer(generation, shape, site.model, usage=usage)
            return StreamingResponse(events, media_type="text/event-stream")
        answer = whole_answer(generation, shape, site.model)
        return JSONResponse(await _unless_disconnected(http, answer))

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request, body: ChatRequest) -> Response:
        _check_model(site, body.model)
        _check_text(body)
        fetched = await fetch_images(body, site.images, fetcher)
        prompts = await off_loop(functools.partial(chat_prompts, body, fetched))
        return await respond(http, body, prompts, ChatShape(site.encoder.decode, body.likeliest))

    @app.post("/v1/completions")
    async def completions(http: Request, body: CompletionRequest) -> Response:
        _check_model(site, body.model)
        _check_text(body)
        prompts = await off_loop(functools.partial(text_prompts, body))
        return await respond(http, body, prompts, TextShape(site.encoder.decode, body.likeliest))


def _add_status(app: FastAPI, site: Site) -> None:
    created = int(time.time())
    card = {"id": site.model, "object": "model", "created": created, "owned_by": "mmflash-jax"}
    card["max_model_len"] = site.engine.shape.capacity

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(site, name)
        return card

    @app.get("/health")
    async def health() -> Response:
        why = site.engine.stuck(site.stuck_s)
        body = {"status": "ok"} if why is None else {"status": "unhealthy", "reason": why}
        return JSONResponse(body, status_code=200 if why is None else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        text = generate_latest(site.engine.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _check_model(site: Site, name: str) -> None:
    if name != site.model:
        message = f"the model {name!r} is not served here, {site.model!r} is"
        raise APIError(404, message, param="model", code="model_not_found")


def _check_text(body: ChatRequest | CompletionRequest) -> None:
    """Refuse halves of characters: they are valid JSON and no text."""
    try:
        body.model_dump_json().encode()
    except ValueError:
        raise APIError(400, "the body is not valid UTF-8 text (a lone surrogate)") from None


async def _unless_disconnected(http: Request, answer: Awaitable[Any]) -> Any:
    """The answer, given up as soon as the client is gone."""
    working = asyncio.ensure_future(answer)

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            # Nobody reads this.
            raise APIError(499, "the client closed the connection")
        return working.result()
    finally:
        watching.cancel()
        working.cancel()


class _Gate:
    """Turns away requests without the key and bodies that are too large, before they are read."""

    def __init__(self, app: ASGIApp, site: Site):
        self._app, self._site = app, site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        error = self._refusal(scope["path"], headers)
        if error is not None:
            self._site.engine.metrics.refused(error.status)
            await self._drain(receive)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._counted(receive), send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> APIError | None:
        key = self._site.api_key
        if key is not None and path.startswith("/v1"):
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, key.encode()):
                return APIError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._site.most_body_bytes:
            return self._too_large()
        return None

    async def _drain(self, receive: Receive) -> None:
        """Read a refused body, within reason: a client that is still sending sees no answer."""
        left = 4 * self._site.most_body_bytes
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                return

    def _too_large(self) -> APIError:
        most = self._site.most_body_bytes
        return APIError(413, f"the body is larger than the {most} bytes taken")

    def _counted(self, receive: Receive) -> Receive:
        """Bodies without a length are counted as they come."""
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._site.most_body_bytes:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted
