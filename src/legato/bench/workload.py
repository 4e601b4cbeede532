"""Workloads: fixed requests that every engine runs alike."""

import json
from pathlib import Path
from typing import Any

from legato.checks import check_int, refuse, token_ids
from legato.errors import InvalidValueError


def read_workload(path: Path) -> dict[str, Any]:
    """Read {"name", "requests": [{"prompt_ids", "max_new_tokens"}]}.

    Raises:
        InvalidValueError: the file holds anything else.
    """
    try:
        workload = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidValueError(f"{path} holds no JSON: {error}") from error
    check_workload(workload)
    return workload


def check_workload(workload: Any) -> None:
    """Raises `InvalidValueError` for anything that is not of the form `read_workload` tells."""
    requests = workload.get("requests") if isinstance(workload, dict) else None
    if not isinstance(requests, list) or not requests or not isinstance(workload.get("name"), str):
        raise InvalidValueError("the workload must be an object with a name and a list of requests")
    for request in requests:
        if not isinstance(request, dict) or not {"prompt_ids", "max_new_tokens"} <= set(request):
            raise refuse("requests", request, "objects with prompt_ids and max_new_tokens")
        check_int("max_new_tokens", request["max_new_tokens"], 1)
        if not token_ids("prompt_ids", request["prompt_ids"]):
            raise refuse("prompt_ids", [], "at least 1 token id")
