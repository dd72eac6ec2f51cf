"""Builds a Gemma-style tokenizer: spaces become "▁", BPE over whole texts, bytes as a fallback.

The family runs BPE without splitting the text first, so what may not merge has to be kept apart
while the merges are learnt: spaces from the word before, digits, capitals and punctuation from
everything.
"""

import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as splitters

from mmflash_jax.demo.recipe.tokenizer import (
    LARGEST_VOCABULARY,
    SMALLEST_COUNT,
    ids_of,
    training_texts,
    with_specials,
)

PAD, EOS, BOS, UNK, MASK = "<pad>", "<eos>", "<bos>", "<unk>", "<mask>"
TURN_START, TURN_END = "<|turn>", "<turn|>"
IMAGE_START, IMAGE_PAD, IMAGE_END = "<|image>", "<|image|>", "<image|>"
AUDIO_START, AUDIO_PAD, AUDIO_END = "<|audio>", "<|audio|>", "<audio|>"
VIDEO_PAD = "<|video|>"
CHANNEL_START, CHANNEL_END = "<|channel>", "<channel|>"
THINK, TOOL_RESPONSE = "<|think|>", "<|tool_response>"
# In the order of their ids.
SPECIAL_TOKENS = (
    *(PAD, EOS, BOS, UNK, MASK, TURN_START, TURN_END),
    *(IMAGE_START, IMAGE_PAD, IMAGE_END, AUDIO_START, AUDIO_PAD, AUDIO_END, VIDEO_PAD),
    *(CHANNEL_START, CHANNEL_END, THINK, TOOL_RESPONSE),
)
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_SPACE = "▁"
_CHARACTERS = [_SPACE, "\n", "\t", *sorted(set(string.printable) - set(string.whitespace))]

TOKENIZER_CONFIG = {
    "tokenizer_class": "GemmaTokenizer",
    "add_bos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
    "padding_side": "left",
    "pad_token": PAD,
    "eos_token": EOS,
    "bos_token": BOS,
    "unk_token": UNK,
    "mask_token": MASK,
    "extra_special_tokens": {
        "boi_token": IMAGE_START,
        "image_token": IMAGE_PAD,
        "eoi_token": IMAGE_END,
        "boa_token": AUDIO_START,
        "audio_token": AUDIO_PAD,
        "eoa_token": AUDIO_END,
        "sot_token": TURN_START,
        "eot_token": TURN_END,
        "soc_token": CHANNEL_START,
        "eoc_token": CHANNEL_END,
        "think_token": THINK,
    },
}


def build_tokenizer() -> Tokenizer:
    """Train on the corpus and return a tokenizer with the family's plain pre-tokenizer."""
    texts = training_texts("model")
    tokenizer = Tokenizer(models.BPE(unk_token=UNK, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.pre_tokenizer = splitters.Split(Regex(f"{_SPACE}?[a-z]+|."), "isolated")
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=LARGEST_VOCABULARY,
            min_frequency=SMALLEST_COUNT,
            # The trainer takes byte pieces in no other way; they leave `added_tokens` next.
            special_tokens=specials + [AddedToken(byte, normalized=False) for byte in _BYTES],
            initial_alphabet=_CHARACTERS,
            show_progress=False,
        ),
    )
    tokenizer = with_specials(tokenizer, SPECIAL_TOKENS, set(SPECIAL_TOKENS))
    split = ids_of(tokenizer, texts[:2000])
    # Without effect, as no space is left by then, but it is what the family's files carry.
    tokenizer.pre_tokenizer = splitters.Split(" ", "merged_with_previous")
    if ids_of(tokenizer, texts[:2000]) != split:
        raise ValueError("the family's pre-tokenizer gives other ids than the one trained with")
    return tokenizer
