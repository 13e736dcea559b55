# SPDX-License-Identifier: Apache-2.0
"""Tables of measured times that kernels are chosen by: a line for each case, and the runs that cases are from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_fp8ext.bench.provenance import provenance


class Measured:
    """A table in a file, of which this is one more run. Cases that the run does not measure stay."""

    def __init__(self, file: Path, key: Sequence[str]) -> None:
        """`key`: fields that tell cases apart."""
        known = json.loads(file.read_text()) if file.exists() else {"runs": [], "cases": []}
        self._file, self._key = file, key
        self._runs = [*known["runs"], provenance()]
        self._cases = {self._place(case): case for case in known["cases"]}

    @property
    def cases(self) -> list[dict[str, Any]]:
        """Cases that were measured."""
        return list(self._cases.values())

    def put(self, case: dict[str, Any]) -> None:
        """In the place of what was known of it, in the file at once.

        Raises:
            ValueError: a number is none (NaN, infinite).
        """
        json.dumps(case, allow_nan=False)
        self._cases[self._place(case)] = {**case, "run": len(self._runs) - 1}
        kept = [self._cases[place] for place in sorted(self._cases)]
        runs, cases = (
            ",\n  ".join(json.dumps(one, allow_nan=False) for one in ones) for ones in (self._runs, kept)
        )
        self._file.write_text(f'{{"runs": [\n  {runs}\n ],\n "cases": [\n  {cases}\n ]}}\n')

    def _place(self, case: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(case[name] for name in self._key)
