"""What differs between the model families that the recipe can train; all else is shared."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedConfig

from mmflash_jax.demo.recipe.network import ShapeT, TargetNetwork

DEMO_FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True)
class PromptMarks:
    """Special strings of a prompt, and its text around the picture's tokens and the question.

    The chat template writes `image_pad` once a picture; whoever prepares the prompt repeats it, and
    in some families wraps the run in `image_open` and `image_close`.
    """

    pad: str
    turn_end: str
    image_pad: str
    before_image: str
    after_image: str
    after_question: str
    image_open: str = ""
    image_close: str = ""

    def picture(self, image_tokens: int) -> str:
        """What takes the place of the template's single pad."""
        return f"{self.image_open}{self.image_pad * image_tokens}{self.image_close}"


@dataclass(frozen=True)
class Family(Generic[ShapeT]):
    """One family's part in the recipe.

    `stop_tokens` end generation. `vision_prefixes` start the names of the weights that the glyph
    warm-up trains. Weights whose names end in `float32_suffixes` are stored unrounded.
    `published_config` turns the class's own dictionary into what the family's checkpoints carry.
    `picture_inputs` takes an image processor and its output, and gives the model's inputs and the
    number of image tokens.
    """

    name: str
    marks: PromptMarks
    stop_tokens: tuple[str, ...]
    vision_prefixes: tuple[str, ...]
    float32_suffixes: tuple[str, ...]
    tokenizer_config: Mapping[str, Any]
    build_tokenizer: Callable[[], Tokenizer]
    shape: type[ShapeT]
    network: type[TargetNetwork[ShapeT]]
    initial_weights: Callable[[ShapeT, int], dict[str, Tensor]]
    model_config: Callable[[ShapeT, Tokenizer], PreTrainedConfig]
    published_config: Callable[[dict[str, Any], ShapeT], dict[str, Any]]
    preprocessor_config: Callable[[ShapeT], dict[str, Any]]
    picture_inputs: Callable[[Any, Mapping[str, Any]], tuple[dict[str, Tensor], int]]

    @property
    def folder(self) -> Path:
        """Where the family's files ship; the chat template there is written by hand."""
        return DEMO_FOLDER / self.name
