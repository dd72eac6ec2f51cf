"""Builds a Qwen-style tokenizer: byte-level BPE with the family's special tokens.

The family splits digits by itself; capitals come out one by one because no merge may cross one.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as splitters

from mmflash_jax.demo.recipe.tokenizer import (
    LARGEST_VOCABULARY,
    SMALLEST_COUNT,
    ids_of,
    training_texts,
    with_specials,
)

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

TOKENIZER_CONFIG = {
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


def build_tokenizer() -> Tokenizer:
    """Train on the corpus and return a tokenizer with the family's plain pre-tokenizer."""
    texts = training_texts("assistant")
    byte_level = splitters.ByteLevel(add_prefix_space=False, use_regex=False)
    family = splitters.Sequence([splitters.Split(Regex(FAMILY_SPLIT), "isolated"), byte_level])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = splitters.Sequence(
        [splitters.Split(Regex("[A-Z]"), "isolated"), family]
    )
    added = SPECIAL_TOKENS + THINKING_TOKENS
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=LARGEST_VOCABULARY,
            min_frequency=SMALLEST_COUNT,
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in added],
            initial_alphabet=splitters.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = with_specials(tokenizer, SPECIAL_TOKENS, set(added))
    isolated = ids_of(tokenizer, texts[:2000])
    tokenizer.pre_tokenizer = family
    if ids_of(tokenizer, texts[:2000]) != isolated:
        raise ValueError("the family's pre-tokenizer gives other ids than the one trained with")
    return tokenizer
