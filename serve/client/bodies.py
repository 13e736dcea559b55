# SPDX-License-Identifier: Apache-2.0
"""Request bodies of the client: what is wrong with an argument is a `ValueError` here."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)


def body_of(model: type[M], **fields: Any) -> M:
    """Return a body of these fields.

    Raises:
        ValueError: a field that is not what it should be, with what was found.
    """
    try:
        return model(**fields)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, part['loc']))}: {part['msg']}, found {part['input']!r}"
            for part in error.errors()
        ]
        raise ValueError("; ".join(wrong)) from None
