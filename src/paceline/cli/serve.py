"""`paceline serve`: answer over HTTP."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import SERVING, Settings, with_settings
from paceline.cli.reporting import print_notice
from paceline.config import api_keys_from_environment
from paceline.errors import BackendUnavailableError, ConfigError
from paceline.installation import install_command
from paceline.server.settings import ServerSettings, keys_in, read_keys

API_KEY_HELP = (
    "A key that requests must send; may be given several times. Every user of this machine can see it with ps: --api-key-file and "
    "PACELINE_API_KEYS keep it private."
)
API_KEY_FILE_HELP = "A file with the keys that are accepted, one a line. Without it and --api-key, PACELINE_API_KEYS holds them."


MODELS_HELP = "The models to serve, as --model takes one; several share the server and its options, and are loaded when they are requested."


@partial(with_settings, panels=SERVING, has_model_argument=False)
def serve(
    models: Annotated[list[str] | None, typer.Argument(help=MODELS_HELP, metavar="[MODEL]...")] = None,
    *,
    api_key: Annotated[list[str] | None, typer.Option("--api-key", metavar="<str>", help=API_KEY_HELP, rich_help_panel="Server")] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help=API_KEY_FILE_HELP, rich_help_panel="Server")] = None,
    settings: Settings,
) -> None:
    """Answer over HTTP as OpenAI's, Anthropic's and Ollama's APIs do, with a chat page for people.

    SIGTERM and Ctrl-C let running requests finish; a second one does not wait for them.
    """
    keys = () if api_key_file is None else read_keys(api_key_file)
    keys = tuple(api_key or ()) + keys or keys_in(api_keys_from_environment(), "of PACELINE_API_KEYS")
    server = ServerSettings(**settings.server, api_keys=keys)
    for line in server.notices:
        print_notice(line)
    if api_key:
        print_notice("--api-key: every user of this machine can see the key with ps; --api-key-file and PACELINE_API_KEYS keep it private")
    served = [*([settings.engine.model] if settings.names_model else []), *(models or [])]
    if not served:
        served = [settings.engine.model]
        for line in settings.start_lines:
            print_notice(line)
    if settings.cluster.replicas and len(served) > 1:
        raise ConfigError(f"replicas serve one model, and {len(served)} are given: leave --replicas out, or serve one model")
    try:
        from paceline.server.replicas.ray_serve import run_replicas
        from paceline.server.run import run
    except ImportError as error:
        raise BackendUnavailableError(f"a server needs {error.name}: {install_command('serve')}") from error
    if settings.cluster.replicas:
        arguments = {**settings.llm_arguments(), "model": served[0]}
        run_replicas(arguments, server, settings.cluster, print_line=print_notice, quiet=settings.quiet, debug=settings.debug)
        return
    run(served, settings.llm_arguments(), server, print_line=print_notice, quiet=settings.quiet)
