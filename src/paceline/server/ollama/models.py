"""What Ollama's clients ask of models: which there are, which are loaded, and what is known of one."""

import hashlib
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from paceline.server.ollama.answers import now
from paceline.server.ollama.fields import ShowFields
from paceline.server.service import Service

API_VERSION = "0.12.11"  # the release whose dialect this is; clients look for what it can do
_LATEST = ":latest"


def ollama_model_routes(service: Service) -> APIRouter:
    """The routes of Ollama's dialect that tell of models."""
    router = APIRouter(tags=["ollama"])
    started = now()

    @router.get("/api/version")
    async def version() -> Response:
        """The version of Ollama whose dialect is spoken."""
        return JSONResponse({"version": API_VERSION})

    @router.get("/api/tags")
    async def tags() -> Response:
        """The one model that is served."""
        return JSONResponse({"models": [{**_described(service), "modified_at": started}]})

    @router.get("/api/ps")
    async def running() -> Response:
        """The same, as one that is loaded, and for good."""
        context = service.engine.opened.maker.max_context
        more = {"size_vram": 0, "expires_at": "9999-12-31T23:59:59Z", "context_length": context}
        return JSONResponse({"models": [{**_described(service), **more}]})

    @router.post("/api/show")
    async def show(fields: ShowFields) -> Response:
        """What is known of it."""
        check_model(service, fields.model or fields.name)
        opened = service.engine.opened
        family = opened.engine.runtime.config.family
        return JSONResponse(
            {
                "details": _details(service),
                "model_info": {"general.architecture": family, f"{family}.context_length": opened.maker.max_context},
                "capabilities": ["completion", *_capabilities(service)],
                "parameters": "",
                "template": "",
                "modified_at": started,
            }
        )

    return router


def check_model(service: Service, name: str | None) -> None:
    """That a request asks for the model that is here; Ollama's names may end with a tag.

    Raises:
        HttpError: 404.
    """
    service.check_model(name if name is None or name == service.model else name.removesuffix(_LATEST))


def _described(service: Service) -> dict[str, Any]:
    """A model of a list. The digest stands for its name and this server's version, and no size is told: files are not read for it."""
    digest = hashlib.sha256(f"{service.model} {service.fingerprint}".encode()).hexdigest()
    return {"name": service.model, "model": service.model, "size": 0, "digest": digest, "details": _details(service)}


def _details(service: Service) -> dict[str, Any]:
    config = service.engine.opened.engine.runtime.config
    return {
        "parent_model": "",
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
