# SPDX-License-Identifier: Apache-2.0
"""One error for everything that is wrong with the tensors of an update."""

from typing import Any

from vllm_fp8ext.errors import UpdateError


def refusal(problems: list[dict[str, Any]]) -> UpdateError:
    """For everything wrong with a chunk; its kind is the problems' when they agree."""
    kinds = {problem["kind"] for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else "invalid-tensors"
    return UpdateError(kind, _told(problems), status=422, problems=problems)


def incomplete(
    missing: list[str], required: int, problems: list[dict[str, Any]], what: str = "the update"
) -> UpdateError:
    """For an update, or a checkpoint, that lacks tensors, or has none. `problems`: of what was refused."""
    reason = f"lacks {len(missing)} of {required} tensors: {_some(missing)}" if missing else "brings nothing"
    message = "; ".join([f"{what} {reason}", *([_told(problems)] if problems else [])])
    return UpdateError("incomplete", message, status=422, missing=missing, problems=problems)


def _told(problems: list[dict[str, Any]]) -> str:
    lines = [
        " ".join(f"{key} {value}" for key, value in problem.items() if key != "kind") for problem in problems
    ]
    described = [f"{problem['kind']}: {line}" for problem, line in zip(problems, lines, strict=True)]
    return f"{len(problems)} problem{'s' * (len(problems) != 1)}: {_some(described, '; ')}"


def _some(items: list[str], separator: str = ", ", limit: int = 8) -> str:
    more = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(items[:limit]) + more
