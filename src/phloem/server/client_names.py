"""What a client calls the fields that our checks know by other names, so that errors speak of its request.

Owns the renaming of errors. Routes give the names: `max_tokens` is `max_output_tokens` to one client, and
`messages[3].content` the `input[1].output` of another. Must not know any route's fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from phloem.errors import InvalidRequestError

Names = Mapping[str, str]
"""The client's names by ours. A name stands for all that lies below it too; of several the longest counts."""


@contextmanager
def client_names(names: Names) -> Iterator[None]:
    """Rename the field of an InvalidRequestError that comes from inside."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param is not None:
            name = renamed(error.param, names)
            if error.message.startswith(error.param):
                error.message = name + error.message.removeprefix(error.param)
            error.param = name
        raise


def renamed(param: str, names: Names) -> str:
    """The client's name of a field."""
    fitting = [ours for ours in names if param == ours or param.startswith((f"{ours}.", f"{ours}["))]
    if not fitting:
        return param
    longest = max(fitting, key=len)
    return names[longest] + param.removeprefix(longest)
