"""Builds the demo's tokenizer: Qwen-style byte-level BPE with the family's special tokens.

Labels and numbers come out character by character: digits because the family splits them, capitals
because no merge may cross one. A label that is one token would make reading it a lookup among a
hundred and fifty classes.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as splitters

from mmflash_jax.demo.corpus import sample_examples

# The Qwen3.5 family's own split rule: single digits, letters with their marks.
FAMILY_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD, MASK = "<|image_pad|>", "<|video_pad|>", "<|mask|>"
SPECIAL_TOKENS = (PAD, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD, MASK)
# As in the family, the thinking marks are kept when special tokens are skipped.
THINKING_TOKENS = ("<think>", "</think>")

_LARGEST_VOCABULARY = 1024
_CORPUS_SEED = 99
_CORPUS_SIZE = 6000


def build_tokenizer() -> Tokenizer:
    """Train on the corpus and return a tokenizer with the family's plain pre-tokenizer."""
    texts = list(_training_texts())
    byte_level = splitters.ByteLevel(add_prefix_space=False, use_regex=False)
    family = splitters.Sequence([splitters.Split(Regex(FAMILY_SPLIT), "isolated"), byte_level])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = splitters.Sequence(
        [splitters.Split(Regex("[A-Z]"), "isolated"), family]
    )
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    thinking = [AddedToken(token, special=False, normalized=False) for token in THINKING_TOKENS]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=_LARGEST_VOCABULARY,
            min_frequency=20,
            special_tokens=specials + thinking,
            initial_alphabet=splitters.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # The trainer marks everything it was given as special.
    as_json = json.loads(tokenizer.to_str())
    for token in as_json["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    tokenizer = Tokenizer.from_str(json.dumps(as_json))
    isolated = [encoding.ids for encoding in tokenizer.encode_batch(texts[:2000])]
    tokenizer.pre_tokenizer = family
    plain = [encoding.ids for encoding in tokenizer.encode_batch(texts[:2000])]
    if isolated != plain:
        raise ValueError("the family's pre-tokenizer gives other ids than the one trained with")
    return tokenizer


def write_tokenizer(folder: Path) -> Tokenizer:
    """Build the tokenizer and write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer = build_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "unk_token": None,
        "mask_token": MASK,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:-1]),
        "split_special_tokens": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of 64."""
    return -(-tokenizer.get_vocab_size() // 64) * 64


def _training_texts() -> Iterator[str]:
    examples = sample_examples(_CORPUS_SIZE, _CORPUS_SEED)
    for example in examples:
        # Role names belong to the text, or they would be split into letters.
        yield f"user\n{example.question}\nassistant\n{example.answer_text}"
    yield from ["system\n\n"] * 50
