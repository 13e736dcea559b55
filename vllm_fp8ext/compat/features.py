# SPDX-License-Identifier: Apache-2.0
"""Tells which features a server has, by this vLLM, this machine and these settings.

Without `core` nothing starts. Others are off one by one.
"""

import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_fp8ext.compat.interfaces import CORE, Feature, features
from vllm_fp8ext.compat.probe import SourceTree, installed_root
from vllm_fp8ext.compat.speed.supported_engines import reason_not_plain
from vllm_fp8ext.config import METHOD, Settings
from vllm_fp8ext.errors import ConfigError, UnsupportedVllmError
from vllm_fp8ext.log import log_once

logger = logging.getLogger("vllm.fp8ext")

KEY = "fp8ext_features_off"
"""Key of vLLM's additional configuration: reasons by the names of features that are off."""
_reasons: dict[str, str | None] = {}
"""Features that were looked for in vLLM: why each is off, or None."""
_reasons_told: dict[str, dict[str, str]] = {}
"""Reasons that were told last, here or by another process, under `KEY`: why features are off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureState:
    """One feature of a server. `reason`: why it is off."""

    name: str
    on: bool
    reason: str | None


def is_available(name: str) -> bool:
    """Tell whether vLLM has every name that a feature needs. Read once in a process."""
    return reason_missing(name) is None


def reason_missing(name: str) -> str | None:
    """Say in a phrase what keeps a feature off with this vLLM; None when nothing does."""
    if KEY in _reasons_told:
        return _reasons_told[KEY].get(name)
    return _missing_here(name)


def _missing_here(name: str) -> str | None:
    if name not in _reasons:
        _reasons[name] = reason_off(features()[name], _missing_here, _problems(name))
    return _reasons[name]


def tell(config: Any) -> None:
    """Note in a `VllmConfig` which features are off, and log them.

    This process, the engine core and workers heed it.

    Raises:
        ConfigError: the settings switch off what is no feature, or `core`.
    """
    asked = Settings.parse(config.additional_config).features_off
    known = sorted(name for name in features() if name != CORE)
    if unknown := [name for name in asked if name not in known]:
        raise ConfigError(
            f"features_off: expected some of {', '.join(known)}, found {', '.join(map(repr, unknown))}"
        )

    other_engine = reason_not_plain(config)
    ranks = "tensor parallelism" if config.parallel_config.tensor_parallel_size != 1 else None

    @functools.cache
    def reason(name: str) -> str | None:
        chosen = "the settings: features_off" if name in asked else None
        feature = features()[name]
        engine = (feature.plain_engines and other_engine) or (feature.one_rank and ranks) or None
        return chosen or _missing_here(name) or engine or reason_off(feature, reason, ())

    reasons = {name: why for name in features() if name != CORE and (why := reason(name))}
    config.additional_config = {**(config.additional_config or {}), KEY: reasons}
    adopt(config)
    of_engines = {other_engine, ranks} - {None}
    _warn(tuple((name, why) for name, why in reasons.items() if why not in of_engines))
    for engine in of_engines:
        if names := [name for name, why in reasons.items() if why == engine]:
            log_once(f"blockfp8: off with {engine}: {', '.join(names)}")


def adopt(config: Any) -> None:
    """Take over what `tell` has written, in another process."""
    missing = (config.additional_config or {}).get(KEY)
    if missing is not None:
        _reasons_told[KEY] = missing


def reason_off(feature: Feature, reason_of: Any, problems: Iterable[str]) -> str | None:
    """Say why a feature is off, which lacks these names, or needs others: `reason_of` their names says why those are off."""
    lacking = list(problems)
    if lacking:
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        return f"vLLM lacks a name: {lacking[0]}{more}"
    for other in sorted(feature.needs):
        if reason_of(other) is not None:
            return f"it needs {other}, which is off"
    return None


def require_core() -> None:
    """Refuse a vLLM that lacks what nothing is served without.

    Raises:
        UnsupportedVllmError: names every interface that is missing.
    """
    missing = _problems(CORE)
    if missing:
        raise UnsupportedVllmError(
            "--quantization blockfp8 needs interfaces that this vLLM lacks:\n  " + "\n  ".join(missing)
        )


@functools.cache
def _warn(missing: tuple[tuple[str, str], ...]) -> None:
    """Log one warning for each feature, once in a process."""
    for name, reason in missing:
        logger.warning("blockfp8: the feature %s is off: %s", name, reason)


def states(config: Any) -> list[FeatureState]:
    """Tell of each feature of an engine with this `VllmConfig` whether it is on. Which layers and steps it takes, the log
    says."""
    if config.model_config.quantization != METHOD:
        return []
    from vllm.platforms import current_platform

    settings, is_cuda = Settings.parse(config.additional_config), current_platform.is_cuda()

    @functools.cache
    def reason(name: str) -> str | None:
        feature = features()[name]
        missing = reason_missing(name)
        return missing or _reason_here(feature, settings, is_cuda=is_cuda) or reason_off(feature, reason, ())

    return [
        FeatureState(name=name, on=reason(name) is None, reason=reason(name))
        for name in features()
        if name != CORE
    ]


def _reason_here(feature: Feature, settings: Settings, *, is_cuda: bool) -> str | None:
    if feature.gpu_only and not is_cuda:
        return "no CUDA GPU"
    if feature.switch is None:
        return None
    path, off = feature.switch
    value = functools.reduce(getattr, path.split("."), settings)
    return f"the settings: {path} is {value!r}" if value == off else None


@functools.cache
def _problems(name: str) -> tuple[str, ...]:
    """Tell in one line each which names of a feature vLLM lacks."""
    tree = _installed()
    if tree is None:
        return ("vllm: the package is not installed",)
    return tuple(line for interface in features()[name].interfaces if (line := tree.problem(interface)))


@functools.cache
def _installed() -> SourceTree | None:
    root = installed_root()
    return None if root is None else SourceTree(root)
