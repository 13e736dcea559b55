# SPDX-License-Identifier: Apache-2.0
"""One error for everything that is wrong with the tensors of an update."""

from typing import Any

from vllm_fp8ext.errors import UpdateError

_SPELLED_OUT = 8
"""Problems, or names, that a message spells out."""
PROBLEMS_LISTED = 100
"""Most problems that an answer lists: writing them all down would hold up every stream of tokens."""

NO_WEIGHTS = "no weights have come since the start with load format dummy"
"""Why an engine without weights generates nothing."""
NO_CURRENT_WEIGHTS = f"{NO_WEIGHTS}, nor may it answer before it has those of the other servers"
"""Why an engine without weights generates nothing, if it is to be ready when current."""
NOT_CURRENT = "nobody has said that its weights are those of the other servers"
"""Why an engine with weights generates nothing, if it is to be ready when current."""

_IS_WHAT = {"no-weights": "has no weights", "not-current": "is not current", "poisoned": "is poisoned"}


def not_generating(reason: str) -> UpdateError:
    """Make the error of requests to an engine that generates nothing, for a reason."""
    kind = "poisoned"
    if reason in (NO_WEIGHTS, NO_CURRENT_WEIGHTS):
        kind = "no-weights"
    elif reason == NOT_CURRENT:
        kind = "not-current"
    message = f"the engine {_IS_WHAT[kind]} until a full update is committed: {reason}"
    # clients of the OpenAI API read the member `error`
    openai: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": 503}
    return UpdateError(kind, message, status=503, error=openai)


def refusal(problems: list[dict[str, Any]]) -> UpdateError:
    """For everything wrong with a chunk; its kind is the problems' when they agree."""
    kinds = {problem["kind"] for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else "invalid-tensors"
    return UpdateError(kind, _summary(problems), status=422, **listed(problems))


def listed(problems: list[dict[str, Any]], count: int | None = None) -> dict[str, Any]:
    """Return the first `PROBLEMS_LISTED` problems and how many there are: `count`, if these are not all."""
    return {
        "problems": problems[:PROBLEMS_LISTED],
        "problem_count": len(problems) if count is None else count,
    }


def incomplete(
    missing: list[str],
    required: int,
    problems: list[dict[str, Any]],
    what: str = "the update",
    count: int | None = None,
) -> UpdateError:
    """For an update, or a checkpoint, that lacks tensors, or has none. `problems`: of what was refused; `count`: of them, if
    these are not all."""
    some = _some(missing, len(missing), ", ")
    reason = f"lacks {len(missing)} of {required} tensors: {some}" if missing else "brings nothing"
    message = "; ".join([f"{what} {reason}", *([_summary(problems, count)] if problems else [])])
    return UpdateError("incomplete", message, status=422, missing=missing, **listed(problems, count))


def _summary(problems: list[dict[str, Any]], count: int | None = None) -> str:
    described = [
        f"{problem['kind']}: " + " ".join(f"{key} {value}" for key, value in problem.items() if key != "kind")
        for problem in problems[:_SPELLED_OUT]
    ]
    count = len(problems) if count is None else count
    return f"{count} problem{'s' * (count != 1)}: {_some(described, count, '; ')}"


def _some(items: list[str], count: int, separator: str) -> str:
    more = f"{separator}and {count - _SPELLED_OUT} more" if count > _SPELLED_OUT else ""
    return separator.join(items[:_SPELLED_OUT]) + more
