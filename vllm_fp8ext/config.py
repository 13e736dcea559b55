# SPDX-License-Identifier: Apache-2.0
"""The settings of a server: `--additional-config '{"fp8ext": {…}}'`, validated."""

import difflib
import ipaddress
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from vllm_fp8ext.errors import ConfigError
from vllm_fp8ext.kernel_settings import KernelSettings
from vllm_fp8ext.kv_settings import KvScalesSetting

METHOD = "blockfp8"
"""Name of the quantization method, for `--quantization`."""
MIN_CAPABILITY = 90
"""Compute capability from which GPUs take it, times ten: Hopper."""
SECTION = "fp8ext"
"""Key of our settings in vLLM's `--additional-config`."""

GRAPH_TOKENS = 2048
"""Up to which CUDA graphs reach by default, at least."""

GIB = 1 << 30


class CanarySettings(BaseModel):
    """Prompts that every update is tried on before it is served."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompts: Annotated[
        tuple[Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)], ...],
        Field(min_length=1, max_length=64, strict=False),
    ]
    """Token ids of each prompt."""

    max_perplexity: float | None = Field(default=None, gt=0)
    """Refuse weights whose perplexity over these prompts is above this."""


class ServingSettings(BaseModel):
    """How tokens get from the engine to the answers of the API server."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    output_interval: int = Field(default=16, ge=1, le=1024)
    """Tokens of a request that the engine sends together; 1: each by itself, as vLLM does. It is for clients that wait for
    the whole answer and give no stop strings."""

    stream_interval: int = Field(default=2, ge=1, le=64)
    """Tokens of a stream that the engine sends together while more than 32 requests run; 1: each by itself."""

    flat_logprobs: bool = True
    """Keep logprobs of sampled tokens in flat lists (`vllm.logprobs.FlatLogprobs`), and make answers of these. Else each
    token has a dictionary."""


class Settings(BaseModel):
    """Settings that a user can choose. Every field has a default; an unknown key or a wrong value is an error at start."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    scale_format: Literal["fp32", "pow2"] = "fp32"
    """Format of block scales: `amax / 448`, or the smallest power of two that is not below it."""

    ignore: tuple[str, ...] = Field(default=(), strict=False)
    """Layers kept in the checkpoint's precision: names or shell patterns of modules (`*.o_proj`, `model.layers.0.*`)."""

    quantize: tuple[str, ...] = Field(default=(), strict=False)
    """Layers served in FP8 though they stay in 16 bits by default. They are named as in `ignore`. By default layers of
    encoders stay in 16 bits, and shapes that FP8 kernels do not take for many tokens."""

    lm_head: Literal["bf16", "fp32", "blockfp8"] = "bf16"
    """The output layer. `bf16`: logits are computed in the dtype of the model. `fp32`: its products are added up to logits in
    fp32, as trainers compute them. `blockfp8`: it is served in FP8 as projections are; where it is the embedding, in a copy
    that follows it."""

    kernels: KernelSettings = Field(default_factory=KernelSettings)
    """How linear layers are computed on a GPU."""

    serving: ServingSettings = Field(default_factory=ServingSettings)
    """How tokens get from the engine to the answers of the API server."""

    draft_weights: Literal["refuse", "keep"] = "refuse"
    """Weights of a draft model, which updates do not bring. `refuse`: the start is refused. `keep`: they stay as they were
    loaded; outputs follow the served weights all the same, and fewer drafts are accepted as these move away."""

    features_off: tuple[str, ...] = Field(default=(), strict=False)
    """Features to serve without, by their names in `GET /weights`: to find out what one does, or costs."""

    staging: Literal["shadow", "inplace", "none"] = "shadow"
    """`shadow` keeps a second copy of the served weights: updates are atomic, and rollback is possible. `inplace` saves its
    memory and writes into the served weights: the engine stands still from an update's first tensor to its commit, and one
    that fails in between leaves it poisoned. `none` refuses updates."""

    kv_scales: KvScalesSetting | None = None
    """Required with an FP8 KV cache: who computes its scales, and how (`kv_settings`)."""

    allowed_dirs: tuple[str, ...] = Field(default=(), strict=False)
    """Folders from which `…/files` and `/load` may read checkpoints. None by default."""

    spool_dir: str = "/dev/shm"
    """Folder in which uploaded chunks wait until every rank has staged them."""

    spool_bytes: int = Field(default=4 * GIB, ge=1 << 16)
    """Largest total size of waiting chunks, and so of one chunk. An upload beyond it waits. API server processes share it in
    equal parts."""

    upload_idle_seconds: float = Field(default=60.0, gt=0)
    """Longest time between two pieces of an upload; one that stops gives its room back. It is also the longest time that
    ranks wait for a broadcast: for all processes of its group, and for each bucket."""

    busy_staging_rate: float = Field(default=80e9, ge=0)
    """Most bytes a second that a rank stages beside running requests; 0: as many as it can. The limit holds for tensors on
    its GPU: they slow each step a little instead of a few steps much."""

    receive_bytes: int = Field(default=GIB, ge=1 << 16)
    """Largest bucket that is received by broadcast, or the largest tensor if that is larger. Each rank keeps one on its
    device from the first broadcast on."""

    deadline_seconds: float = Field(default=600.0, gt=0)
    """Longest time that one call may wait for the engine. An engine whose workers do not answer for this long ends."""

    update_lifetime_seconds: float = Field(default=3600.0, gt=0)
    """An open update to which nothing happens for this long expires."""

    native_complete: bool = False
    """Updates by vLLM's own weight transfer must bring every tensor, as others do. By default what does not come keeps its
    served weights."""

    native_pickled_handles: bool = False
    """CUDA IPC handles may come pickled, as vLLM's own HTTP client sends them. They are read as data: nothing of a pickle is
    executed."""

    native_update_seconds: float = Field(default=600.0, gt=0)
    """An update by a trainer's calls is abandoned after so long without any.

    The engine ends if a call in a worker has begun to load, and then does nothing for this long."""

    dummy_weights: Literal["refuse", "serve"] = "refuse"
    """Answer of a server that was started with `--load-format dummy`: `refuse` requests until a full update has come, or
    `serve` random weights. With `staging` `none` no update comes, and random weights are served."""

    ready: Literal["at_start", "when_current"] = "at_start"
    """When requests are answered: `at_start`, or `when_current`, for a server that joins others. Then `/health` is 503 until
    a full update is committed, or until `POST /fp8ext/v1/weights/current` says that its weights are those of the others."""

    load_weights_end: Literal["mark", "complete"] = "mark"
    """When tensors that a trainer brings by `model.load_weights` are served: `mark` when it says that all have come, by
    `finalize_layerwise_reload`, `process_weights_after_loading` or `finish_weight_update`; `complete` also as soon as every
    tensor of the manifest has come, for trainers that never say so."""

    pause_deadline_seconds: float | None = Field(default=None, gt=0)
    """Longest pause that others ask for: then generation goes on. By default a pause has no end of its own."""

    trusted_clients: tuple[str, ...] = Field(default=(), strict=False)
    """Addresses, or ranges (`127.0.0.1/32`), that may call vLLM's own weight routes without a key. None by default."""

    canary: CanarySettings | None = None
    """Prompts that every update is tried on. By default a built-in sample of 64 token ids, on which logits must be finite."""

    untried_layers: Literal["finite", "refuse"] = "finite"
    """Fate of a model with layers that no canary can run. `finite`: every tensor of an update must be finite, and that is
    all that is tried; the log says so. `refuse`: the start is refused."""

    @model_validator(mode="after")
    def _takes_updates(self) -> Self:
        if self.ready == "when_current" and self.staging == "none":
            raise ValueError(
                "ready when_current waits for an update: expected staging shadow or inplace, found none"
            )
        return self

    @field_validator("trusted_clients")
    @classmethod
    def _addresses(cls, ranges: tuple[str, ...]) -> tuple[str, ...]:
        for text in ranges:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(f"expected an address or a range such as 10.0.0.0/8: {error}") from None
        return ranges

    @classmethod
    def parse(cls, additional_config: Mapping[str, Any] | None) -> "Settings":
        """Settings in vLLM's additional configuration.

        Raises:
            ConfigError: naming every unknown key and wrong value, with what is valid.
        """
        beside = sorted(set(additional_config or {}) & set(cls.model_fields))
        if beside:
            raise ConfigError(
                f'--additional-config: expected {", ".join(beside)} inside "{SECTION}", as in '
                f'{{"{SECTION}": {{"{beside[0]}": …}}}}, found outside'
            )
        for name in additional_config or {}:
            if name != SECTION and difflib.get_close_matches(name.lower(), [SECTION], cutoff=0.8):
                raise ConfigError(f'--additional-config: expected "{SECTION}", found "{name}"')
        section = (additional_config or {}).get(SECTION, {})
        if not isinstance(section, Mapping):
            raise ConfigError(f'--additional-config "{SECTION}": expected an object, found {section!r}')
        try:
            return cls.model_validate(dict(section))
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            keys = ", ".join(sorted(_model_at(problem["loc"][:-1]).model_fields))
            lines.append(f"  {name}: unknown key; the keys are {keys}")
        else:
            lines.append(f"  {name}: {problem['msg']}, found {problem['input']!r}")
    return f'--additional-config "{SECTION}" is not valid:\n' + "\n".join(lines)


def _model_at(path: tuple[int | str, ...]) -> type[BaseModel]:
    """The settings that a path of keys leads to."""
    model: type[BaseModel] = Settings
    for part in path:
        annotation = model.model_fields[str(part)].annotation if part in model.model_fields else None
        model = next(_models_in(annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
