"""What Ollama's clients ask of models: which there are, which are loaded, and what is known of one."""

import hashlib
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from paceline.server.json_body import JsonRoute
from paceline.server.ollama.answers import now
from paceline.server.ollama.fields import ShowFields
from paceline.server.service import LATEST, Service

API_VERSION = "0.12.11"  # the release whose dialect this is; clients look for what it can do


def ollama_model_routes(service: Service) -> APIRouter:
    """The routes of Ollama's dialect that tell of models."""
    router = APIRouter(route_class=JsonRoute, tags=["ollama"])
    started = now()

    @router.get("/api/version")
    async def version() -> Response:
        """The version of Ollama whose dialect is spoken."""
        return JSONResponse({"version": API_VERSION})

    @router.get("/api/tags")
    async def tags() -> Response:
        """The model that is served, and its adapters."""
        return JSONResponse({"models": [{**one, "modified_at": started} for one in _all(service)]})

    @router.get("/api/ps")
    async def running() -> Response:
        """The same, as loaded, and for good."""
        context = service.engine.opened.maker.max_context
        more = {"size_vram": 0, "expires_at": "9999-12-31T23:59:59Z", "context_length": context}
        return JSONResponse({"models": [{**one, **more} for one in _all(service)]})

    @router.post("/api/show")
    async def show(fields: ShowFields) -> Response:
        """What is known of it."""
        adapter = adapter_of(service, fields.model or fields.name)
        opened = service.engine.opened
        family = opened.engine.runtime.config.family
        return JSONResponse(
            {
                "details": _details(service, adapter),
                "model_info": {"general.architecture": family, f"{family}.context_length": opened.maker.max_context},
                "capabilities": ["completion", *_capabilities(service)],
                "parameters": "",
                "template": "",
                "modified_at": started,
            }
        )

    return router


def adapter_of(service: Service, name: str | None) -> str | None:
    """The adapter that a request asks for; None = the model. Ollama's names may end with a tag.

    Raises:
        HttpError: 404.
    """
    is_whole = name is None or name == service.model or name in service.engine.adapters
    return service.adapter_of(name if name is None or is_whole else name.removesuffix(LATEST))


def _all(service: Service) -> list[dict[str, Any]]:
    return [_described(service, adapter) for adapter in (None, *service.engine.adapters)]


def _described(service: Service, adapter: str | None) -> dict[str, Any]:
    """A model of a list. The digest stands for its name and this server's version, and no size is told: files are not read for it."""
    name = adapter or service.model
    digest = hashlib.sha256(f"{name} {service.fingerprint}".encode()).hexdigest()
    return {"name": name, "model": name, "size": 0, "digest": digest, "details": _details(service, adapter)}


def _details(service: Service, adapter: str | None) -> dict[str, Any]:
    config = service.engine.opened.engine.runtime.config
    return {
        "parent_model": "" if adapter is None else service.model,
        "format": "",
        "family": config.family,
        "families": [config.family],
        "parameter_size": "",
        "quantization_level": config.weight_type.value,
    }


def _capabilities(service: Service) -> list[str]:
    tokenizer = service.engine.opened.maker.tokenizer
    if not tokenizer.has_chat_template:
        return []
    return [name for name, variable in (("tools", "tools"), ("thinking", "enable_thinking")) if tokenizer.template_takes(variable)]
