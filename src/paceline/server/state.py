"""Routes for health checks and metrics."""

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from paceline.errors import PacelineError
from paceline.server.service import Service


def state_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["state"])

    @router.get("/health")
    async def health() -> Response:
        """200 while the engine runs, else 503: restart the server."""
        return _state(service, is_refused=False)

    @router.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken; 503 while the server drains: send them elsewhere."""
        return _state(service, is_refused=service.admission.is_draining)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Counters and histograms in Prometheus's text form."""
        return Response(service.metrics.text(await service.engine.stats()), media_type=CONTENT_TYPE_LATEST)

    return router


def _state(service: Service, *, is_refused: bool) -> Response:
    try:
        service.engine.check_open()
    except PacelineError:
        return JSONResponse({"status": "failed"}, 503)
    return JSONResponse({"status": "draining"}, 503) if is_refused else JSONResponse({"status": "ok"})
