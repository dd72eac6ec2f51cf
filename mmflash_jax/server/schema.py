"""Bodies of requests, as OpenAI's API and vLLM's additions to it name their fields.

A field that changes the answer and is not implemented is refused by name, never ignored. Fields
that only label a request are accepted.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_BIASES = 1024
MOST_LOGPROBS = 20

Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(BaseModel):
    """What a stream brings besides text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class _Sampled(BaseModel):
    """Fields that chat and text completions share."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    model: str
    max_tokens: Count | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: Seed | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MOST_STOPS)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MOST_BIASES
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_drafted: bool | None = None
    """Ours: each streamed choice also tells its text token by token, and which were drafted."""

    # Labels: they change no answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (None, 1),
        "ignore_eos": (None, False),
        "min_tokens": (None, 0),
        "skip_special_tokens": (None, True),
        "include_stop_str_in_output": (None, False),
    }
    """Fields that are not implemented, and the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_implemented(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, allowed in cls.neutral.items():
            if name in values and not any(
                values[name] == one and type(values[name]) is type(one) for one in allowed
            ):
                raise ValueError(f"{name} is not supported by this server")
        return {name: value for name, value in values.items() if name not in cls.neutral}

    @model_validator(mode="after")
    def _check_stops(self) -> "_Sampled":
        if len(self.stops) > MOST_STOPS or not all(self.stops):
            raise ValueError(f"stop must be at most {MOST_STOPS} strings that are not empty")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.return_drafted and not self.stream:
            raise ValueError("return_drafted needs stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ImageURL(BaseModel):
    """Where an image is; `detail` is a hint that the image processor here has no use for."""

    model_config = ConfigDict(extra="forbid")
    url: str
    detail: str | None = None


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class ImagePart(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["image_url"]
    image_url: ImageURL


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid")
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: None = None

    @property
    def parts(self) -> list[TextPart | ImagePart]:
        """Of a content that has parts."""
        return self.content if isinstance(self.content, list) else []


class ThinkingOption(BaseModel):
    """Arguments of the chat template."""

    model_config = ConfigDict(extra="forbid")
    enable_thinking: bool | None = None


class ChatRequest(_Sampled):
    """Body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    chat_template_kwargs: ThinkingOption | None = None
    parallel_tool_calls: bool | None = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = _Sampled.neutral | {
        "response_format": (None, {"type": "text"}),
        "tools": (None, []),
        "tool_choice": (None, "none", "auto"),
        "functions": (None, []),
        "function_call": (None, "none", "auto"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
    }

    @property
    def likeliest(self) -> int | None:
        """Likeliest tokens to report beside the chosen one; None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class CompletionRequest(_Sampled):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = _Sampled.neutral | {
        "echo": (None, False),
        "suffix": (None, ""),
    }

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [[id for id in prompt if isinstance(id, int)]]
        return [one for one in prompt if not isinstance(one, int)]
