"""What the families' tokenizers share: the text they are trained on, and how they are written.

Labels and numbers come out character by character: a label that is one token would make reading it
a lookup among a hundred and fifty classes.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mmflash_jax.demo.corpus import sample_examples
from mmflash_jax.demo.recipe.family import Family

LARGEST_VOCABULARY = 1024
SMALLEST_COUNT = 20  # of a pair that is merged
_CORPUS_SEED = 99
_CORPUS_SIZE = 6000


def training_texts(model_role: str) -> list[str]:
    """Questions and answers in turns of `user` and `model_role`."""
    examples = sample_examples(_CORPUS_SIZE, _CORPUS_SEED)
    # Role names belong to the text, or they would be split into letters.
    texts = [
        f"user\n{example.question}\n{model_role}\n{example.answer_text}" for example in examples
    ]
    return texts + ["system\n\n"] * 50


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]


def with_specials(tokenizer: Tokenizer, special: tuple[str, ...], kept: set[str]) -> Tokenizer:
    """Keep only `kept` as added tokens, `special` among them as special ones.

    The trainer marks everything it was given as special, and decoding would drop it.
    """
    content = json.loads(tokenizer.to_str())
    added = [token for token in content["added_tokens"] if token["content"] in kept]
    content["added_tokens"] = [{**token, "special": token["content"] in special} for token in added]
    return Tokenizer.from_str(json.dumps(content))


def write_tokenizer(folder: Path, family: Family[Any]) -> Tokenizer:
    """Build the family's tokenizer and write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer = family.build_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(family.tokenizer_config, indent=2)
    (folder / "tokenizer_config.json").write_text(config + "\n")
    return tokenizer


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of 64."""
    return -(-tokenizer.get_vocab_size() // 64) * 64
