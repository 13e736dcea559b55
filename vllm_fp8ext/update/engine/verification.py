# SPDX-License-Identifier: Apache-2.0
"""Whether every rank still serves what was committed."""

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.labels import Label


class Fingerprints:
    """Of each rank's weights, by the label that they are served with: those served now, and those before."""

    def __init__(self) -> None:
        self._known: dict[Label, list[int]] = {}

    def of(self, label: Label) -> list[int]:
        """By rank; none for weights that nobody knows."""
        return self._known.get(label, [])

    def keep(self, live: Label, fingerprints: list[int], previous: Label | None) -> None:
        """From now on `live` is served; `previous` is what a rollback would bring back."""
        kept = {previous: self._known[previous]} if previous in self._known else {}
        self._known = {**kept, live: fingerprints}

    def require(self, label: Label, found: list[int]) -> None:
        """Compare what every rank serves.

        Raises:
            UpdateError: `weights-differ`, naming the ranks.
        """
        expected = self.of(label)
        wrong = [rank for rank, value in enumerate(found) if [value] != expected[rank : rank + 1]]
        if wrong:
            raise UpdateError(
                "weights-differ",
                f"rank {', '.join(map(str, wrong))}: the served weights are not those that were committed as epoch "
                f"{label.epoch} (version {label.version})",
                status=500,
                ranks=wrong,
            )
