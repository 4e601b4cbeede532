"""The HTTP application: its routes, and how errors are told."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from legato.errors import LegatoError
from legato.server.completions import add_completions
from legato.server.conversation import tokenize
from legato.server.errors import ApiError
from legato.server.limits import BODY_TOO_LARGE, Gate, refuse
from legato.server.openapi import describe
from legato.server.page import add_page
from legato.server.protocol import DetokenizeRequest, TokenizeRequest
from legato.server.responses import add_responses
from legato.server.service import Service
from legato.server.streaming import unless_gone
from legato.text import decode


def create_app(service: Service) -> FastAPI:
    """The application around a running manager."""
    app = FastAPI(title="Legato", version=version("legato"), docs_url=None, redoc_url=None)
    app.add_middleware(Gate, open_calls=service.open_calls, api_keys=service.api_keys, limits=service.limits)
    _add_errors(app)
    add_completions(app, service)
    add_responses(app, service)
    _add_facts(app, service)
    add_page(app, service.manager, service.is_ready)
    describe(app)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return refuse(error)

    @app.exception_handler(LegatoError)
    async def legato_error(request: Request, error: LegatoError) -> JSONResponse:
        return refuse(ApiError.of(error))

    @app.exception_handler(RequestValidationError)
    async def wrong_shape(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = [part for part in first["loc"] if isinstance(part, str) and part != "body"]
        kind = request.headers.get("Content-Type", "")
        if not where and "json" not in kind:  # what curl sends by itself
            return refuse(ApiError(400, f"Content-Type is {kind!r}: it must be application/json"))
        return refuse(ApiError(400, f"{'.'.join(where) or 'the body'}: {first['msg']}", where[0] if where else None))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = {413: BODY_TOO_LARGE}.get(error.status_code, "http_error")
        response = refuse(ApiError(error.status_code, str(error.detail), code=code))
        response.headers.update(error.headers or {})  # a 405's Allow
        return response

    @app.exception_handler(Exception)
    async def own_fault(request: Request, error: Exception) -> JSONResponse:
        return refuse(ApiError.of(error))  # it is logged by whoever calls this


def _add_facts(app: FastAPI, service: Service) -> None:
    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        """Refused: these models make none."""
        raise ApiError(400, "this server generates text: it has no embeddings", code="not_supported")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The same by its name."""
        if name != service.model:
            raise ApiError(404, f"model={name!r} is not served here", "model", code="model_not_found")
        return _model_card(service)

    @app.post("/tokenize")
    async def tokenize_text(request: Request, asked: TokenizeRequest) -> Response:
        """Token ids of a text or a conversation."""
        return await unless_gone(request, _tokenize(service, asked))

    @app.post("/detokenize")
    async def detokenize_ids(request: Request, asked: DetokenizeRequest) -> Response:
        """The text of token ids."""
        return await unless_gone(request, _detokenize(service, asked))

    @app.get("/health")
    async def health() -> Response:
        """200 as long as the engine is alive."""
        return Response(status_code=200 if service.manager.is_running() else 503)

    @app.get("/ready")
    async def ready() -> Response:
        """200 as long as new requests are taken."""
        return Response(status_code=200 if service.is_ready() else 503)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """Of Legato."""
        return {"version": version("legato")}

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model, "object": "model", "created": service.created, "owned_by": "legato",
        "max_model_len": service.manager.max_tokens,
    }  # fmt: skip


async def _tokenize(service: Service, asked: TokenizeRequest) -> Response:
    headers, deadline = service.check(asked), service.deadline()
    tokens = await service.tokenizing.run(tokenize, service.tokenizer, asked, service.limits, deadline=deadline)
    told = {"tokens": tokens, "count": len(tokens), "max_model_len": service.manager.max_tokens}
    return JSONResponse(told, headers=headers)


async def _detokenize(service: Service, asked: DetokenizeRequest) -> Response:
    headers, deadline = service.check(asked), service.deadline()
    size = len(service.tokenizer)
    bad = [token_id for token_id in asked.tokens if not 0 <= token_id < size]
    if bad:
        raise ApiError(400, f"tokens has {bad[0]}: the tokenizer knows 0 to {size - 1}", "tokens")
    text = await service.tokenizing.run(decode, service.tokenizer, asked.tokens, deadline=deadline)
    return JSONResponse({"prompt": text}, headers=headers)
