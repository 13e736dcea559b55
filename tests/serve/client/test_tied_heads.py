# SPDX-License-Identifier: Apache-2.0
"""Which output layers are left out of a push: those that are the embedding here and at the server."""

import numpy as np
import torch
from torch import Tensor

from vllm_fp8ext.serve.client.source import source_of

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = {
    "dtypes": ["bfloat16", "float32"],
    "ignored": [],
    "tied": {HEAD: EMBED},
    "aliases": {"language_model.lm_head.weight": HEAD},
}
UNTIED = {**TIED, "tied": {}}


def sent(weights: object, *manifests: dict[str, object]) -> list[str]:
    """Names of the parts of a push to these servers."""

    def asked():
        return list(manifests)
        yield

    flow = source_of(weights, asked)  # type: ignore[arg-type]
    while True:
        try:
            next(flow)
        except StopIteration as done:
            return [part.name for part in done.value.parts]


def test_what_is_one_memory_here_and_there_is_sent_once() -> None:
    embedding: Tensor = torch.ones(4, 2)
    state = {EMBED: embedding, HEAD: embedding.detach()}
    assert sent(state, TIED) == [EMBED]
    assert sent({EMBED: embedding, "language_model.lm_head.weight": embedding}, TIED) == [EMBED]
    assert sent(state, TIED, UNTIED) == sent(state, UNTIED) == [EMBED, HEAD]
    array = np.ones((4, 2), np.float32)
    assert sent({EMBED: array, HEAD: array}, TIED) == [EMBED]


def test_what_has_memory_of_its_own_is_compared_by_the_server() -> None:
    embedding = torch.ones(4, 2)
    for head in (embedding.clone(), embedding[:2], embedding.t(), np.ones((4, 2), np.float32)):
        assert sent({EMBED: embedding, HEAD: head}, TIED) == [EMBED, HEAD]
    assert sent(iter([(EMBED, embedding), (HEAD, embedding)]), TIED) == [EMBED, HEAD]
    assert sent({HEAD: embedding}, TIED) == [HEAD]
