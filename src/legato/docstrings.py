"""What a class says of its fields, so that help and reference are told from one source."""

import inspect
import re

_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {6,}.*)*)", re.MULTILINE)


def described_fields(cls: type) -> dict[str, str]:
    """Texts of the docstring's Args, by name, each on one line; nothing where docstrings were stripped."""
    arguments = (inspect.getdoc(cls) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(arguments)}
