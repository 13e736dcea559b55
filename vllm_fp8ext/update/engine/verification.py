# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of what was committed, which every rank must still serve."""

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.labels import Label


class CommittedFingerprints:
    """Fingerprints of each rank's weights by their label: of those served now, and of those before."""

    def __init__(self) -> None:
        self._known: dict[Label, list[int]] = {}

    def of(self, label: Label) -> list[int]:
        """Return them by rank; none for weights that nobody knows."""
        return self._known.get(label, [])

    def keep(self, live: Label, fingerprints: list[int], previous: Label | None) -> None:
        """Record that `live` is served from now on; `previous` is what a rollback would bring back."""
        kept = {previous: self._known[previous]} if previous in self._known else {}
        self._known = {**kept, live: fingerprints}

    def relabel(self, before: Label, label: Label) -> None:
        """Record that what was served as `before` is served as `label`."""
        self._known = {label if known == before else known: marks for known, marks in self._known.items()}

    def require(self, label: Label, served: list[int]) -> None:
        """Compare what every rank serves.

        Raises:
            UpdateError: `weights-differ`, naming the ranks.
        """
        expected = self.of(label)
        wrong = [rank for rank, value in enumerate(served) if [value] != expected[rank : rank + 1]]
        if wrong:
            raise UpdateError(
                "weights-differ",
                f"rank {', '.join(map(str, wrong))}: the served weights are not those that were committed as epoch "
                f"{label.epoch} (version {label.version})",
                status=500,
                ranks=wrong,
            )
