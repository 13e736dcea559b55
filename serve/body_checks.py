# SPDX-License-Identifier: Apache-2.0
"""Checks a body from outside first: it is parsed, counted, and compared with the manifest.

Everything goes in and comes out as plain data, so that it can be done in another process. Needs neither torch nor vLLM.
"""

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from vllm_fp8ext.errors import Failure, UpdateError, errors_as_results
from vllm_fp8ext.update.contract.claims import Claim, opening_problems
from vllm_fp8ext.update.contract.manifest import Manifest, TensorSpec
from vllm_fp8ext.update.contract.safetensors_header import described_tensors, require_names, too_many
from vllm_fp8ext.update.contract.update_errors import PROBLEMS_LISTED, listed, refusal

Result = dict[str, Any]

_SHOWN = 300
"""Characters of a client's own text that an answer repeats: names of fields are its own, too."""
_LISTABLE = 10_000
"""Most problems of a JSON body of which the first are listed: pydantic makes a list of all or of none."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of what is parsed. `json_bytes`: of a JSON body; `values`, `objects`, `lists`: in it, more or less;
    `header_bytes`: of a safetensors header; `tensors`: in either."""

    json_bytes: int = 1 << 16
    values: int = 1 << 12
    objects: int = 1 << 9
    lists: int = 1 << 10
    header_bytes: int = 1 << 18
    tensors: int = 1 << 8

    @classmethod
    def of(cls, manifest: Manifest) -> "Limits":
        """Return limits for every tensor of a manifest, in any form, and 256 others. Block scales are counted, and as many
        token ids as a canary and a calibration take."""
        names = [*manifest.tensors, *manifest.fused, *manifest.ignored, *manifest.tied]
        longest = max((len(name) for name in (*names, *manifest.aliases)), default=0)
        tensors = 2 * len(names) + cls.tensors
        values = cls.values + _TOKENS + tensors * _TENSOR_VALUES
        header_bytes = min(cls.header_bytes + tensors * (longest + _TENSOR_BYTES), _HEADER_BYTES)
        json_bytes = cls.json_bytes + _TOKENS * _TOKEN_BYTES + tensors * (longest + _TENSOR_BYTES)
        return cls(
            json_bytes=min(json_bytes, _JSON_BYTES),
            values=values,
            objects=_TENSOR_OBJECTS * tensors,
            lists=_TENSOR_LISTS * tensors,
            header_bytes=header_bytes,
            tensors=tensors,
        )

    def require_few(self, body: bytes) -> None:
        """Count what is in a JSON body, before it is parsed.

        Raises:
            UpdateError: `body-too-large`.
        """
        for mark, what, limit in (
            (b",", "values", self.values),
            (b"{", "objects", self.objects),
            (b"[", "lists", self.lists),
        ):
            count = body.count(mark)
            if count > limit:
                message = f"a JSON body may have {limit} {what} here, found {count}"
                raise UpdateError("body-too-large", message, status=413, limit=limit)


_TOKENS, _TOKEN_BYTES = 64 * 4096 + (1 << 16), 16
_TENSOR_VALUES, _TENSOR_BYTES = 16, 512
_TENSOR_OBJECTS, _TENSOR_LISTS = 10, 10
"""A handle on each of 8 GPUs, with a shape and strides."""
_HEADER_BYTES, _JSON_BYTES = 16 << 20, 64 << 20


class BodyChecks:
    """The checks of one server. `manifest`: of what it serves, once that is known; plain, as it is told to clients."""

    def __init__(self) -> None:
        self.limits = Limits()
        self._manifest: Manifest | None = None
        self._tasks: dict[str, Callable[..., Result]] = {
            "manifest": self._know,
            "json": self._json,
            "header": self._header,
        }

    def run(self, task: str, *arguments: Any) -> Result:
        """Run a task. Never raises: the result is plain, or `{"error": …}`."""
        result = errors_as_results(self._tasks[task])(*arguments)
        return {"error": result.error.as_dict()} if isinstance(result, Failure) else result

    def _know(self, manifest: dict[str, Any]) -> Result:
        self._manifest = Manifest.from_dict(manifest)
        self.limits = Limits.of(self._manifest)
        return {"limits": asdict(self.limits)}

    def _json(self, model: str, body: bytes) -> Result:
        """Fields of a body of this model (`module:name`), nested ones plain."""
        self.limits.require_few(body)
        module, _, name = model.partition(":")
        form: type[BaseModel] = getattr(importlib.import_module(module), name)
        try:
            fields = form.model_validate_json(body).model_dump()
        except ValidationError as error:
            raise invalid(error) from None
        tensors = fields.get("tensors")
        if tensors is not None and len(tensors) > self.limits.tensors:
            raise too_many(len(tensors), self.limits.tensors, "the body")
        if isinstance(tensors, dict) and self._manifest is not None:
            known = self._manifest.canonical
            claims = {known(name): Claim.from_dict(claim) for name, claim in tensors.items()}
            _require_mostly_known(opening_problems(claims, self._manifest))
        return {"fields": fields}

    def _header(self, header: bytes, length: int, name: str) -> Result:
        """`[name, shape, dtype, start, size]` of each tensor of a safetensors body (`described_tensors`)."""
        stored = described_tensors(header, length, name, self.limits.tensors)
        require_names(stored, name)
        if self._manifest is not None:
            _require_mostly_known(
                self._manifest.problems(self._manifest.renamed(tensor.spec for tensor in stored))
            )
        return {"tensors": [[*_plain(tensor.spec), tensor.start, tensor.size] for tensor in stored]}


def _plain(spec: TensorSpec) -> tuple[str, list[int], str]:
    return spec.name, list(spec.shape), spec.dtype


def _require_mostly_known(problems: list[dict[str, Any]]) -> None:
    """Refuse tensors of which more are unknown than an answer lists: the engine, which knows what else may be wrong with
    them, could add nothing to it."""
    unknown = [problem for problem in problems if problem["kind"] == "unknown-tensor"]
    if len(unknown) > PROBLEMS_LISTED:
        raise refusal(problems)


def invalid(error: ValidationError) -> UpdateError:
    """Return the refusal of a JSON body that has another form."""
    count = error.error_count()
    if count > _LISTABLE:
        message = f"{count} values are not as they should be, too many to be listed"
        return UpdateError("invalid-request", message, status=422, **listed([], count))
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    return invalid_request([{"loc": ("body", *item["loc"]), "msg": item["msg"]} for item in errors])


def invalid_request(errors: list[Any]) -> UpdateError:
    """Return the refusal of what pydantic finds wrong (`loc` and `msg` of each)."""
    problems = [
        {"where": f"{'.'.join(map(str, item['loc'])):.{_SHOWN}}", "message": f"{item['msg']:.{_SHOWN}}"}
        for item in errors[:PROBLEMS_LISTED]
    ]
    detail = "; ".join(f"{item['where']}: {item['message']}" for item in problems)
    if len(errors) > len(problems):
        detail += f"; and {len(errors) - len(problems)} more"
    return UpdateError("invalid-request", detail, status=422, **listed(problems, len(errors)))
