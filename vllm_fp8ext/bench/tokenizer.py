# SPDX-License-Identifier: Apache-2.0
"""A tokenizer for generated weights: made-up words, so that answers have texts as long as real ones."""

import json
import random
from pathlib import Path

_SPECIAL = "<|endoftext|>"
_SEED = 0


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer for the checkpoint in `folder`, unless it has one.

    It has as many tokens as the embedding has rows.

    Token ids decode to words of one to eight letters, half of them behind a space. The 256 bytes are tokens too, so that some
    are parts of characters. It encodes text letter by letter: prompts are token ids.
    """
    if (folder / "tokenizer.json").exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    draw = random.Random(_SEED)
    words = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    while len(words) < size - 1:
        letters = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 8)))
        words[draw.choice(("", "\u0120")) + letters] = None
    vocabulary = {word: index for index, word in enumerate([*words, _SPECIAL])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=_SPECIAL,
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    tokenizer.save_pretrained(folder)
