# SPDX-License-Identifier: Apache-2.0
"""Text of a client, as a line of a log may show it."""


def shown(text: object) -> str:
    """Escape the characters of `text` that would spoil the log around it: control characters, line ends, marks of writing
    direction, lone surrogates."""
    return "".join(each if each.isprintable() else _escaped(each) for each in str(text))


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
