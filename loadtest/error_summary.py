# SPDX-License-Identifier: Apache-2.0
"""Failures of a run, in the words of who reported them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm_fp8ext.loadtest.records import UNFINISHED, RequestRecord, RunRecords


def most_frequent(failed: list[RequestRecord]) -> dict[str, Any] | None:
    """Return the kind of failure that came most often, its count, status and text. The status is HTTP's, if it has one; the
    text the most frequent one, since texts differ from request to request. None where nothing failed."""
    if not failed:
        return None
    [(kind, count)] = Counter(request.error or "" for request in failed).most_common(1)
    texts = Counter(request.said for request in failed if request.error == kind and request.said)
    status = int(kind[5:]) if kind.startswith("http-") else None
    text = texts.most_common(1)[0][0] if texts else ""
    return {"kind": kind, "status": status, "count": count, "text": text}


def remarks(run: RunRecords, measured: Mapping[str, Any]) -> list[str]:
    """Lines below the tables: the most frequent error of requests, with what to do about it where that is known, an update
    that the end cut off, and each error of updates."""
    lines = []
    error = measured["most_frequent_error"]
    if error:
        head = f"{error['count']} of {measured['requests']} requests failed with {error['kind']}"
        lines.append(f"{head}: {error['text']}" if error["text"] else head)
        if "vocab" in error["text"].lower():
            lines.append(
                f"prompts are random token ids below --vocabulary, which is {run.options.get('vocabulary')}: "
                "set --vocabulary to the size of the model's vocabulary, or less"
            )
    errors = Counter((update.error, update.said) for update in run.updates if update.error is not None)
    if errors.pop((UNFINISHED, None), 0):
        lines.append("the run ended during an update, which was given up")
    for (kind, said), count in errors.most_common():
        lines.append(
            f"{count} of {len(run.updates)} updates failed with {kind}" + (f": {said}" if said else "")
        )
    return lines
