# SPDX-License-Identifier: Apache-2.0
"""The updates of an engine: opened one at a time, found by id, and kept for reading when they have ended."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.update.contract.canary import canary_of, require_prompts_run
from vllm_fp8ext.update.contract.claims import Claim, opening_problems, repeated
from vllm_fp8ext.update.contract.fused import ExpertLayout
from vllm_fp8ext.update.contract.labels import default_version
from vllm_fp8ext.update.contract.manifest import Manifest
from vllm_fp8ext.update.contract.update_errors import refusal
from vllm_fp8ext.update.engine.committer import Committer, Core
from vllm_fp8ext.update.engine.kv_scales import KvEngine
from vllm_fp8ext.update.engine.session import Running, Session
from vllm_fp8ext.update.engine.timestamp import Moment

KEPT = 16


@dataclass(frozen=True, kw_only=True)
class OpenRequest:
    """Fields of a request to open an update: those of `serve.schema.OpenUpdate`, and `through_pause` of a `Session`."""

    id: str | None = None
    version: str | None = None
    base_epoch: int | None = None
    instance: str | None = None
    running: str = Running.KEEP
    wait_seconds: float | None = None
    partial: bool = False
    sparse: bool = False
    tensors: Mapping[str, Any] | None = None
    expert_layout: ExpertLayout | None = None
    canary: Mapping[str, Any] | None = None
    kv_scales: Mapping[str, Any] | None = None
    through_pause: bool = False
    becomes_current: bool = True

    def described(self) -> dict[str, Any]:
        """Return what says which weights these are."""
        return {
            "version": self.version,
            "base_epoch": self.base_epoch,
            "partial": self.partial or self.sparse or None,
            "sparse": self.sparse or None,
            "expert_layout": self.expert_layout,
        }


class Updates:
    """`sessions`: by id, the oldest first."""

    def __init__(self, core: Core, committer: Committer, kv: KvEngine, clock: Callable[[], Moment]) -> None:
        self.sessions: dict[str, Session] = {}
        self._core = core
        self._committer = committer
        self._kv = kv
        self.clock = clock
        self._inplace = core.settings.staging == "inplace"

    def open(self, manifest: Manifest, request: OpenRequest, untried: Sequence[str] = ()) -> Session:
        """Open one. With an `id` that was opened before, that one is returned as it was opened.

        `untried`: kinds of layers for which no prompt runs through new weights.

        Raises:
            UpdateError: `invalid-request`, `poisoned`, `update-open`, `stale-base`, `other-instance` (than `instance`),
                `other-update` (what has this id was opened with something else), `canary-unavailable`, or what is wrong with
                the `tensors` that are announced.
        """
        self.require_instance(request.instance)
        if request.id is not None and request.id in self.sessions:
            _require_same(self.sessions[request.id], request.described())
            return self.sessions[request.id]
        self._require_possible(request)
        session = self._session(manifest, request)
        require_prompts_run(session.canary, untried)
        session.check_base(self._committer.live.epoch)
        self.sessions[session.id] = session
        for old in list(self.sessions)[:-KEPT]:
            del self.sessions[old]
        return session

    def require_instance(self, instance: str | None) -> None:
        """Raises `UpdateError` (`other-instance`) unless the engine is in this life, where one is named."""
        living = self._committer.live.instance
        if instance not in (None, living):
            message = (
                f"the update was made for instance {instance} of the server; it was started anew, as {living}, and counts "
                "epochs from 0 again"
            )
            raise UpdateError("other-instance", message, expected=instance, found=living)

    def _require_possible(self, request: OpenRequest) -> None:
        """Refuse an update that this engine can't take, or not now."""
        partial = request.partial or request.sparse
        if partial and request.base_epoch is None:
            extent = "sparse" if request.sparse else "partial"
            raise UpdateError("invalid-request", f"a {extent} update needs base_epoch", status=422)
        self._committer.require_healing(partial)
        if self._inplace and request.running == Running.WAIT:
            message = (
                "staging inplace can't wait for requests while it overwrites what they run on: expected running keep, "
                "recompute or abort, found wait"
            )
            raise UpdateError("invalid-request", message, status=422)
        busy = self.under_way
        if busy is not None:
            message = (
                f"update {busy.id} (version {busy.version}) is open: one at a time. Commit it, or give it up: "
                f"DELETE /fp8ext/v1/updates/{busy.id} (fp8ext abandon {busy.id})"
            )
            raise UpdateError("update-open", message, open=busy.id)

    def _session(self, manifest: Manifest, request: OpenRequest) -> Session:
        core, settings, version = self._core, self._core.settings, request.version
        return Session(
            claims=_claims(manifest, request),
            id=request.id or uuid.uuid4().hex,
            version=version if version is not None else default_version(self._committer.live.epoch + 1),
            running=Running(request.running),
            manifest=manifest,
            opened_at=self.clock(),
            lifetime=settings.upload_idle_seconds if self._inplace else settings.update_lifetime_seconds,
            canary=canary_of(request.canary, settings, core.vocabulary, core.longest_prompt),
            kv_request=self._kv.request(request.kv_scales),
            base_epoch=request.base_epoch,
            wait_seconds=request.wait_seconds,
            partial=request.partial or request.sparse,
            sparse=request.sparse,
            named=version is not None,
            inplace=self._inplace,
            expert_layout=request.expert_layout,
            through_pause=request.through_pause,
            becomes_current=request.becomes_current,
        )

    def get(self, id: str) -> Session:
        """Raises `UpdateError` (`unknown-update`) where there is none."""
        session = self.sessions.get(id)
        if session is None:
            raise UpdateError("unknown-update", f"no update {id}", status=404)
        return session

    @property
    def under_way(self) -> Session | None:
        """The one that has not ended."""
        return next((session for session in self.sessions.values() if session.live), None)


def _claims(manifest: Manifest, request: OpenRequest) -> dict[str, Claim]:
    """Return the claims of a request by the manifest's names, all of which fit."""
    announced = {name: Claim.from_dict(claim) for name, claim in (request.tensors or {}).items()}
    claims = {manifest.canonical(name): claim for name, claim in announced.items()}
    problems = repeated(announced, manifest) + opening_problems(claims, manifest, request.expert_layout)
    if problems:
        raise refusal(problems)
    return claims


def _require_same(session: Session, described: Mapping[str, Any]) -> None:
    """Raise if a repeated `open` describes other weights than the update it names."""
    for name, value in described.items():
        opened_with = getattr(session, name)
        if value is not None and value != opened_with:
            message = f"update {session.id} was opened with {name} {opened_with!r}: expected the same, found {value!r}"
            raise UpdateError("other-update", message, expected=opened_with, found=value)
