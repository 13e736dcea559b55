# SPDX-License-Identifier: Apache-2.0
"""Which Authorization headers are taken."""

import pytest

from vllm_fp8ext.environment import ADMIN_KEY
from vllm_fp8ext.errors import ConfigError, UpdateError
from vllm_fp8ext.serve.auth import AdminKey
from vllm_fp8ext.serve.client import Client, Replicas
from vllm_fp8ext.serve.client.flow import Endpoint

KEY = "k3y-with spaces~!"


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "])
def test_the_key_is_taken(header: str) -> None:
    AdminKey(KEY).check(header)


def test_a_line_end_is_no_part_of_the_key() -> None:
    """A file's, say, that the variable was set from."""
    AdminKey(f"{KEY}\n").check(f"Bearer {KEY}")
    assert Endpoint.of(None, f"{KEY}\n", timeout=1.0, retries=0).key == KEY
    assert Endpoint.of(None, " ", timeout=1.0, retries=0).key is None


@pytest.mark.parametrize(
    "key", ["schlüssel", "kl\u00fcssel", "a\nb", "a\x00b", "a\tb", "\ufeffkey", "\udcff", "密钥"]
)
def test_a_key_that_nobody_could_send_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^key: expected a key of printable ASCII .* found another one at place \d$"
    ) as caught:
        Client(None, key)
    assert key not in str(caught.value)
    with pytest.raises(ConfigError, match=r"^key: expected"):
        Replicas(["http://a"], key)
    if "\x00" not in key:
        monkeypatch.setenv(ADMIN_KEY, key)
        with pytest.raises(ConfigError, match=f"^{ADMIN_KEY}: expected"):
            Client()


def test_a_key_that_is_given_is_used_even_if_it_is_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)
    result = [Endpoint.of(None, given, timeout=1.0, retries=0).key for given in (None, "other", "")]
    assert result == [KEY, "other", None]


@pytest.mark.parametrize("url", ["http://rollout:8000", "HTTPS://rollout"])
def test_a_scheme_may_be_written_in_either_case(url: str) -> None:
    assert Endpoint.of(url, KEY, timeout=1.0, retries=0).url == url


@pytest.mark.parametrize("url", ["localhost:8000", "//localhost:8000", "ftp://localhost"])
def test_a_url_says_how_it_is_spoken_to(url: str) -> None:
    with pytest.raises(ConfigError, match=f"expected the server's root, such as http://.*, found {url}"):
        Client(url, KEY)


def test_a_blank_key_lets_nobody_in() -> None:
    with pytest.raises(UpdateError) as caught:
        AdminKey("\n").check("Bearer  ")
    assert caught.value.status == 401


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Token {KEY}"])
def test_no_key_is_401(header: str | None) -> None:
    with pytest.raises(UpdateError, match="Authorization: Bearer") as caught:
        AdminKey(KEY).check(header)
    assert (caught.value.kind, caught.value.status) == ("no-key", 401)


@pytest.mark.parametrize("token", [KEY[:-1], KEY + "x", KEY.lower().upper(), f"{KEY} {KEY}", "None", "*"])
def test_a_wrong_key_is_403_and_is_not_repeated(token: str) -> None:
    with pytest.raises(UpdateError) as caught:
        AdminKey(KEY).check(f"Bearer {token}")
    assert (caught.value.kind, caught.value.status, caught.value.details) == ("wrong-key", 403, {})
    assert KEY not in str(caught.value)


def test_the_key_itself_is_not_kept() -> None:
    assert KEY not in repr(vars(AdminKey(KEY)))
