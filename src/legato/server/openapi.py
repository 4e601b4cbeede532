"""What `/openapi.json` tells besides what FastAPI reads off the routes: answers, errors, keys, and what fields mean."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from legato.docstrings import described_fields
from legato.sampling_params import SamplingParams
from legato.server.limits import OPEN_PATHS

Schema = dict[str, Any]

# Fields that are not `SamplingParams`', or not called so there. A description in `protocol.py` comes before these.
_FIELDS = {
    "background": "Not built: true is refused.",
    "best_of": "As many as `n`, or left out.",
    "cache_salt": "Calls with different ones share no cached prefix.",
    "chat_template_kwargs": "Handed to the model's chat template.",
    "content": "A text, or a list of parts of type text.",
    "description": "What it is for, as the model is told.",
    "echo": "Put the prompt before its answer.",
    "format": "What the answer must be.",
    "function": "The function.",
    "include_usage": "A last piece with the call's tokens and no choices.",
    "input": "A text, or the whole conversation as messages and function calls with their outputs.",
    "instructions": "The system message.",
    "grammar": "The answer is one of a grammar's, in Lark's notation or, with `::=`, in llama.cpp's GBNF.",
    "json_schema": "The answer is JSON that this schema allows; what cannot be enforced is refused.",
    "logprobs": "Log-probabilities of the answer's tokens; of a completion, of so many of the likeliest besides.",
    "max_completion_tokens": "New tokens at most; comes before `max_tokens`.",
    "max_output_tokens": "New tokens at most.",
    "max_tokens": "New tokens at most; left out: 1024 of a chat, 16 of a completion, or what there is room for.",
    "messages": "The conversation, as the model's chat template takes it.",
    "n": "Answers to each prompt, which is computed once.",
    "metadata": "Given back as it is.",
    "min_tokens": "No end-of-sequence or stop token before so many new ones.",
    "model": "What is served, by its name; left out: the same.",
    "name": "A name.",
    "parallel_tool_calls": "Whether an answer may call more than one tool.",
    "parameters": "JSON schema of its arguments.",
    "previous_response_id": "Not built, since nothing is kept: refused.",
    "priority": "Lower ones run first; 0 is common.",
    "prompt": "Texts or token ids; a list is answered entry by entry.",
    "response_format": "What the answer must be.",
    "role": "system, user, assistant or tool.",
    "schema": "The JSON schema.",
    "seed": "The same one gives the same tokens, whatever runs beside it.",
    "stop": "Texts that end the answer.",
    "stream": "Answer piece by piece, as server-sent events.",
    "stream_options": "What a stream tells besides.",
    "text": "What the answer must be.",
    "timeout": "Seconds to the last token, above 0; after them the call ends with 408.",
    "tokens": "Token ids.",
    "tool_choice": "Whether a tool may or must be called, or which one.",
    "tools": "Functions that the model may call.",
    "top_logprobs": "Of so many of the likeliest tokens besides, up to 20.",
    "type": "What kind it is.",
}
_ERRORS = {
    "400": "Something in the call cannot be served; `param` names the field.",
    "401": "The key is missing or wrong.",
    "404": "The model is not served here.",
    "408": "The answer was not complete in time, or the body was not.",
    "413": "The body is larger than --max-body-bytes.",
    "429": "The queue is full: --max-queue-size. Try again after Retry-After seconds.",
    "500": "The engine has failed.",
    "503": "The server is shutting down, or the request was cancelled.",
}
_TEXT: Schema = {"type": "string"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_WHOLE: Schema = {"type": "integer"}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(kind: str, **choice: Schema) -> Schema:
    choices = _list(_object(index=_WHOLE, finish_reason=_MAYBE_TEXT, logprobs={"type": ["object", "null"]}, **choice))
    return _object(id=_TEXT, object={"const": kind}, created=_WHOLE, model=_TEXT, choices=choices, usage=_ref("Usage"))


_ANSWERS: dict[str, Schema] = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code=_MAYBE_TEXT)),
    "Usage": _object(prompt_tokens=_WHOLE, completion_tokens=_WHOLE, total_tokens=_WHOLE,
                     prompt_tokens_details=_object(cached_tokens=_WHOLE)),
    "ChatCompletion": _answer("chat.completion", message=_object(role={"const": "assistant"}, content=_MAYBE_TEXT)),
    "TextCompletion": _answer("text_completion", text=_TEXT),
    "Response": _object(id=_TEXT, object={"const": "response"}, created_at={"type": "number"}, status=_TEXT,
                        model=_TEXT, output=_list({"type": "object"})),
    "Model": _object(id=_TEXT, object={"const": "model"}, created=_WHOLE, owned_by=_TEXT, max_model_len=_WHOLE),
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Tokens": _object(tokens=_list(_WHOLE), count=_WHOLE, max_model_len=_WHOLE),
    "Text": _object(prompt=_TEXT),
    "Version": _object(version=_TEXT),
}  # fmt: skip
_ANSWER_OF = {
    "/v1/chat/completions": "ChatCompletion", "/v1/completions": "TextCompletion", "/v1/responses": "Response",
    "/v1/models": "ModelList", "/v1/models/{name}": "Model", "/tokenize": "Tokens", "/detokenize": "Text",
    "/version": "Version",
}  # fmt: skip
_PROBES = {"/health": "The engine has failed.", "/ready": "No new calls are taken."}


def describe(app: FastAPI) -> None:
    """Make the application's schema, at its first use, one that clients can be made from."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(told: Schema) -> Schema:
    schemas = told["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    _describe_fields(schemas)
    schemas.update(_ANSWERS)
    told["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in told["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in OPEN_PATHS else [{"key": []}, {}]
            operation["responses"] = _responses(path, _streams(operation, schemas), "requestBody" in operation)
    return told


def _describe_fields(schemas: dict[str, Schema]) -> None:
    texts = {**described_fields(SamplingParams), **_FIELDS}
    for schema in schemas.values():
        for name, field in schema.get("properties", {}).items():
            text = field.get("description") or texts.get(name, "")
            if text:
                field["description"] = text[:1].upper() + text[1:]


def _streams(operation: Schema, schemas: dict[str, Schema]) -> bool:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    return "stream" in schemas.get(body.get("$ref", "").rpartition("/")[2], {}).get("properties", {})


def _responses(path: str, streams: bool, has_body: bool) -> Schema:
    statuses = [] if path in OPEN_PATHS else ["401"]
    if streams:
        statuses = list(_ERRORS)
    elif has_body:
        statuses += ["400", "404", "408", "413", "503"]
    if path == "/v1/embeddings":
        return {status: _failure(_ERRORS[status]) for status in ("400", "401", "413")}
    if path in _PROBES:
        return {"200": {"description": "It is so."}, "503": {"description": _PROBES[path]}}
    if "{" in path:
        statuses.append("404")
    content: Schema = {"text/plain": {"schema": _TEXT}}
    if path in _ANSWER_OF:
        content = {"application/json": {"schema": _ref(_ANSWER_OF[path])}}
    if streams:
        content["text/event-stream"] = {"schema": {"description": "Server-sent events, each of JSON."}}
    failures = {status: _failure(_ERRORS[status]) for status in sorted(statuses)}
    return {"200": {"description": "The answer.", "content": content}, **failures}


def _failure(text: str) -> Schema:
    return {"description": text, "content": {"application/json": {"schema": _ref("Error")}}}
