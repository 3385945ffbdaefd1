"""Load and remove adapters while the server runs, as in vLLM. These requests name directories, so that a setting must allow them."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from paceline.errors import CapacityError, PacelineError
from paceline.models.adapters.read import MAX_ADAPTER_NAME_LEN
from paceline.server.answering import read_request
from paceline.server.errors import HttpError
from paceline.server.fields import Fields
from paceline.server.model_pool import ModelPool

MAX_PATH_LEN = 4096


class LoadFields(Fields, at=("adapters", "load")):
    lora_name: str
    lora_path: str


class UnloadFields(Fields, at=("adapters", "unload")):
    lora_name: str


def adapter_routes(pool: ModelPool) -> APIRouter:
    """The two routes; none where the settings do not switch them on."""
    router = APIRouter(tags=["adapters"])
    if not pool.settings.adapter_loading:
        return router
    service = pool.models[0].service  # checked: one model, which stays loaded
    assert service is not None

    @router.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        """Load the adapter of a directory on the server's machine; requests name it as their model."""
        fields = await read_request(request, pool, LoadFields)
        name = fields.lora_name
        if not name.strip() or not name.isprintable() or len(name) > MAX_ADAPTER_NAME_LEN or service.is_own_name(name):
            text = f"lora_name must be a name of 1 to {MAX_ADAPTER_NAME_LEN} printable characters that is not the model's own"
            raise HttpError(400, text, parameter="lora_name", code="invalid_value")
        if not fields.lora_path or "\0" in fields.lora_path or len(fields.lora_path) > MAX_PATH_LEN:
            text = f"lora_path must be a directory on the server's machine, of 1 to {MAX_PATH_LEN} characters"
            raise HttpError(400, text, parameter="lora_path", code="invalid_value")
        service.engine.check_open()
        with service.admission.admitted(0):
            try:
                await service.engine.load_adapter(name, fields.lora_path)
            except CapacityError as error:  # the request is right: with less in memory the same one is served
                raise HttpError(507, str(error), kind="server_error", parameter="lora_path", code="out_of_memory") from error
            except PacelineError as error:
                if name in service.engine.adapters:
                    text = f"lora_name: {name!r} is loaded already; unload it first, or give this one another name"
                    raise HttpError(400, text, parameter="lora_name", code="adapter_loaded") from error
                raise HttpError(400, str(error), parameter="lora_path", code="adapter_unusable") from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        """Refuse requests for an adapter from now on; those that run end with it."""
        fields = await read_request(request, pool, UnloadFields)
        known = ", ".join(map(repr, service.engine.adapters)) or "none"
        try:
            await service.engine.unload_adapter(fields.lora_name)
        except PacelineError as error:
            text = f"lora_name: there is no adapter of this name; loaded: {known}"
            raise HttpError(404, text, parameter="lora_name", code="adapter_not_found") from error
        return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")

    return router
