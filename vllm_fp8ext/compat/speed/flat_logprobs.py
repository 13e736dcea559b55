# SPDX-License-Identifier: Apache-2.0
"""Keeps logprobs of sampled tokens in flat lists, without a dictionary for each token.

vLLM decodes every token to a string anew, and makes a dictionary and an object for each, through which the garbage
collector then walks. Here the string of a token is decoded once, and positions are appended several at a time to vLLM's own
`FlatLogprobs`, a sequence of the same dictionaries for who reads it.
"""

from collections.abc import Callable
from typing import Any

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import logprobs as engine_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor

from vllm_fp8ext.compat.speed.written_logprobs import chat_token
from vllm_fp8ext.compat.wrapping import wrap

FEATURE: str = "flat_logprobs"
WHY: str = (
    "Keep logprobs in flat lists: vLLM makes a dictionary and an object for each token, and decodes it anew."
)
GAIN: str = "not measured apart"
REPLACES: tuple[str, ...] = (
    "vllm.v1.engine.logprobs:LogprobsProcessor.from_new_request(tokenizer, request)",
    "vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs(logprobs_lists)",
    "vllm.logprobs:FlatLogprobs.extend",
    "vllm.v1.engine.logprobs:convert_ids_list_to_tokens(tokenizer, token_ids)",
)
USES: dict[str, tuple[str, ...]] = {}
UPSTREAM: str = "https://github.com/vllm-project/vllm/issues/28226"
REMOVE_WHEN: str = "vLLM's are flat"
SWITCH: tuple[str, object] = ("serving.flat_logprobs", False)

_CHAT = "fp8ext_chat"
"""Attribute of a processor: whether its logprobs become a chat's, as vLLM names such requests."""
REPLACEMENT = "\ufffd"
"""With which the string of a token ends that is a part of a character."""


def install() -> None:
    """Idempotent."""
    wrap(engine_logprobs, "convert_ids_list_to_tokens", _wrap_convert)
    wrap(LogprobsProcessor, "_update_sample_logprobs", _wrap_update)
    wrap(FlatLogprobs, "extend", _wrap_extend)
    wrap(LogprobsProcessor, "from_new_request", _wrap_from_new_request)


class TokenStrings:
    """Strings of tokens of one tokenizer, each decoded alone."""

    def __init__(self, convert: Callable[[Any, list[int]], list[str]], tokenizer: Any) -> None:
        self._convert, self._tokenizer = convert, tokenizer
        self.known: dict[int, str] = {}
        """Strings by token id, as far as they were needed."""
        self.partial: set[int] = set()
        """Ids whose string depends on the tokens before."""

    def of(self, token_ids: list[int]) -> list[str]:
        """A new list with the string of each id."""
        known = self.known
        try:
            return [known[token] for token in token_ids]
        except KeyError:
            missing = [token for token in dict.fromkeys(token_ids) if token not in known]
        for token, text in zip(missing, self._convert(self._tokenizer, missing), strict=True):
            known[token] = text
            if text.endswith(REPLACEMENT):
                self.partial.add(token)
        return [known[token] for token in token_ids]


_strings: dict[int, tuple[Any, TokenStrings]] = {}
"""Tokenizers and their strings, by the tokenizer's identity; a tokenizer is kept with its strings."""


def _strings_of(tokenizer: Any) -> TokenStrings:
    kept = _strings.get(id(tokenizer))
    if kept is None:
        kept = _strings[id(tokenizer)] = (tokenizer, TokenStrings(convert_ids_list_to_tokens, tokenizer))
    return kept[1]


def _wrap_convert(original: Any) -> Any:
    def convert(tokenizer: Any, token_ids: list[int]) -> list[str]:
        return _strings_of(tokenizer).of(token_ids)

    return convert


def _wrap_from_new_request(original: Any) -> Any:
    def from_new_request(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, *args, **kwargs)
        if made.logprobs is not None and not isinstance(made.logprobs, FlatLogprobs):
            made.logprobs = FlatLogprobs()
            request = kwargs.get("request") or args[-1]
            whole = request.sampling_params.output_kind == RequestOutputKind.FINAL_ONLY
            setattr(made, _CHAT, whole and str(request.external_req_id).startswith("chatcmpl-"))
        return made

    return from_new_request


def _wrap_update(original: Any) -> Any:
    def update(self: Any, lists: Any) -> None:
        kept = self.logprobs
        ids_np, logprobs_np, ranks_np, _ = lists
        positions, width = ids_np.shape
        if not isinstance(kept, FlatLogprobs):
            return original(self, lists)
        if self.num_logprobs != -1:
            width = min(width, self.num_logprobs + 1)
        if positions == width == 1:  # the usual step of a stream
            return _append_one(self, kept, ids_np.item(0), logprobs_np.item(0), ranks_np.item(0), lists)
        ids = ids_np[:, :width].ravel().tolist()
        if self.tokenizer is None:
            texts: list[Any] = [None] * len(ids)
        else:
            strings = _strings_of(self.tokenizer)
            texts = list(strings.of(ids))
            if not strings.partial.isdisjoint(ids):
                return original(self, lists)
        sampled = logprobs_np[:, 0].tolist()
        total = self.cumulative_logprob
        for value in sampled:
            total += value
        self.cumulative_logprob = total
        start = len(kept.logprobs)
        stop = start + positions * width
        kept.start_indices.extend(range(start, stop, width))
        kept.end_indices.extend(range(start + width, stop + width, width))
        kept.token_ids.extend(ids)
        kept.decoded_tokens.extend(texts)
        if getattr(self, _CHAT, False) and self.tokenizer is not None:
            for text in texts:  # remembered: when answers end together there is less to do
                chat_token(text)
        if width == 1:
            kept.logprobs.extend(sampled)
            kept.ranks.extend(ranks_np.tolist())
        else:
            kept.logprobs.extend(logprobs_np[:, :width].ravel().tolist())
            top = range(1, width)
            for rank in ranks_np.tolist():
                kept.ranks.append(rank)
                kept.ranks.extend(top)

    def _append_one(self: Any, kept: FlatLogprobs, token: int, logprob: float, rank: int, lists: Any) -> None:
        text = None
        if self.tokenizer is not None:
            strings = _strings_of(self.tokenizer)
            text = strings.known.get(token)
            if text is None or token in strings.partial:
                return original(self, lists)
        self.cumulative_logprob += logprob
        start = len(kept.logprobs)
        kept.start_indices.append(start)
        kept.end_indices.append(start + 1)
        kept.token_ids.append(token)
        kept.logprobs.append(logprob)
        kept.ranks.append(rank)
        kept.decoded_tokens.append(text)

    return update


def _wrap_extend(original: Any) -> Any:
    def extend(self: Any, positions: Any) -> None:
        if not isinstance(positions, FlatLogprobs):
            return original(self, positions)
        start = len(self.logprobs)
        self.start_indices.extend([start + index for index in positions.start_indices])
        self.end_indices.extend([start + index for index in positions.end_indices])
        self.token_ids.extend(positions.token_ids)
        self.logprobs.extend(positions.logprobs)
        self.ranks.extend(positions.ranks)
        self.decoded_tokens.extend(positions.decoded_tokens)

    return extend
