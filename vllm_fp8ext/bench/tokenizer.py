# SPDX-License-Identifier: Apache-2.0
"""A tokenizer for generated weights: made-up words, so that answers have texts as long as real ones."""

import json
import random
from pathlib import Path
from typing import Any

_SPECIAL = "<|endoftext|>"
_VISION = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Tokens of Qwen2.5-VL, by the key of its configuration."""
_SEED = 0


def vocabulary_of(folder: Path) -> int:
    """Return how many tokens the model of a checkpoint knows."""
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def text_tokens(folder: Path) -> int:
    """Return how many of its tokens, the first ones, stand for text alone."""
    config = json.loads((folder / "config.json").read_text())
    return min(vocabulary_of(folder), *(config[name] for name in _VISION if name in config), 1 << 30)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer for the checkpoint in `folder`, unless it has one.

    It has as many tokens as the embedding has rows.

    Token ids decode to words of one to eight letters, half of them behind a space. The 256 bytes are tokens too, so that some
    are parts of characters. It encodes text letter by letter: prompts are token ids. A model with a tower gets a processor of
    Qwen2.5-VL's too.
    """
    if (folder / "tokenizer.json").exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size, config = vocabulary_of(folder), json.loads((folder / "config.json").read_text())
    draw = random.Random(_SEED)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < size - 1:
        letters = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 8)))
        words[draw.choice(("", "\u0120")) + letters] = None
    tokens = [*words, _SPECIAL]
    special = {name: word for name, word in _VISION.items() if name in config}
    for name, word in special.items():
        tokens[config[name]] = word
    vocabulary = {word: index for index, word in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=_SPECIAL,
        additional_special_tokens=list(special.values()),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    tokenizer.save_pretrained(folder)
    if "vision_config" in config:
        _write_processor(folder, tokenizer)


def _write_processor(folder: Path, tokenizer: Any) -> None:
    import transformers

    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
