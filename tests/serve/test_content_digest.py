# SPDX-License-Identifier: Apache-2.0
"""`Content-Digest` headers, and bodies that arrive in pieces of any size."""

import base64
import hashlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fp8ext.errors import UpdateError
from vllm_fp8ext.serve.content_digest import ContentDigest

RFC_9530 = b'{"hello": "world"}\n'
"""The body of RFC 9530's examples; the two digests below are the RFC's own."""
SHA_256 = "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"
SHA_512 = "sha-512=:YMAam51Jz/jOATT6/zvHrLVgOYTGFy1d6GJiOHTohq4yP+pgk4vf2aCsyRZOtw8MjkM7iw7yZ/WkppmM44T3qg==:"
OTHER = base64.b64encode(hashlib.sha256(b"other").digest()).decode()


def value(body: bytes, algorithm: str = "sha256") -> str:
    return base64.b64encode(hashlib.new(algorithm, body).digest()).decode()


def take(header: str, body: bytes, cuts: list[int] | None = None) -> None:
    """A body in pieces that end at these places."""
    digest = ContentDigest.parse(header)
    assert digest is not None
    for start, stop in pairwise([0, *(cuts or []), len(body)]):
        digest.update(memoryview(body)[start:stop])
    digest.verify()


def refused(header: str, body: bytes = RFC_9530) -> UpdateError:
    with pytest.raises(UpdateError) as caught:
        take(header, body)
    return caught.value


def test_without_a_header_nothing_is_checked() -> None:
    assert ContentDigest.parse(None) is None


@pytest.mark.parametrize(
    "header",
    [
        SHA_256,
        SHA_512,
        f"{SHA_256}, {SHA_512}",
        f"{SHA_512},{SHA_256}",
        f" {SHA_256} ",
        f"{SHA_256};q=1",
        f"{SHA_256} ; a=1;b, {SHA_512}",
        f"md5=:AAAA:, {SHA_256}",
        f"id-sha-256=:AAAA:,{SHA_256}, unixcksum=::",
        f"sha-256=:{OTHER}:, {SHA_256}",
    ],
)
def test_digests_of_the_rfc(header: str) -> None:
    """With parameters, which mean nothing, beside algorithms that nobody knows, and the last of two that are the same."""
    take(header, RFC_9530)


@pytest.mark.parametrize(
    "header",
    [
        "",
        ",",
        "sha-256",
        "sha-256=",
        "sha-256=:",
        SHA_256.replace(":", ""),
        SHA_256[:-1],
        f"{SHA_256},",
        f"{SHA_256} {SHA_512}",
        SHA_256.replace("=:", "=: "),
        SHA_256.replace("sha-256", "SHA-256"),
        "sha-256=:%%%%:",
        "sha-256=:AAA:",
        "sha-256=:====:",
        "sha-256=:AA=A:",
        f"sha-256=:AAA:, {SHA_512}",
        "md5=:AAAA:",
        "md5=:AAAA:, unixsum=:AAAA:",
        "sha-256=?1",
        "sha-256=:\xe9:",
        "x" * 100_000,
    ],
    ids=lambda header: header[:24],
)
def test_a_header_that_asks_for_nothing_that_is_known_is_refused(header: str) -> None:
    with pytest.raises(UpdateError, match="Content-Digest") as caught:
        ContentDigest.parse(header)
    assert (caught.value.kind, caught.value.status) == ("invalid-digest", 400)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("header", "algorithm"),
    [
        (f"sha-256=:{OTHER}:", "sha-256"),
        (f"{SHA_512}, sha-256=:{OTHER}:", "sha-256"),
        (f"{SHA_256}, sha-512=:{value(b'other', 'sha512')}:", "sha-512"),
        (f"{SHA_256}, sha-256=:{OTHER}:", "sha-256"),
        ("sha-256=::", "sha-256"),
        ("sha-512=:AAAA:", "sha-512"),
    ],
)
def test_every_digest_must_match(header: str, algorithm: str) -> None:
    error = refused(header)
    assert (error.kind, error.status) == ("digest-mismatch", 400)
    assert algorithm in str(error)
    assert error.details["found"] == value(RFC_9530, algorithm.replace("-", ""))
    assert f":{error.details['expected']}:" in header


def test_an_empty_body_has_a_digest() -> None:
    take(f"sha-256=:{value(b'')}:", b"")


@given(st.binary(min_size=1, max_size=300), st.data())
@settings(max_examples=50)
def test_any_pieces_give_the_same_digest(body: bytes, data: st.DataObject) -> None:
    """And one wrong bit is always found."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    header = f"sha-256=:{value(body)}:, sha-512=:{value(body, 'sha512')}:"
    damaged = bytearray(body)
    damaged[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    take(header, body, cuts)
    with pytest.raises(UpdateError, match="sha-256"):
        take(header, bytes(damaged), cuts)
