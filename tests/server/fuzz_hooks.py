"""What schemathesis is told: else nearly every call would ask for a model that is not there, and end with that."""

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """The model that is served, wherever the text of a name stands."""
    is_named = isinstance(body, dict) and isinstance(body.get("model"), str)
    return {**body, "model": "smollm2"} if is_named else body
