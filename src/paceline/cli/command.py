"""How each command parses its arguments: help in two lengths, and wrong usage as one line with the nearest name."""

from copy import copy
from difflib import get_close_matches
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.reporting import EXIT_WRONG_INPUT, print_error
from paceline.spelling import OTHER_NAMES

HELP_NAMES = ("-h", "--help", "--help-all")
COMMON = [
    "model",
    "prompt_option",
    "chat",
    "system",
    "host",
    "port",
    "api_key",
    "served_model_name",
    "quick",
    "prompts",
    "workload",
    "peer",
    "probe",
    "fetch",
    "memory_gb",
    "tokens",
    "max_tokens",
    "temperature",
    "drafter",
    "draft_model",
    "num_speculative_tokens",
    "data",
    "eval_data",
    "minutes",
    "resume",
    "threads",
    "max_model_len",
    "explain",
    "details",
    "as_json",
    "json_file",
    "output",
]
"""Options that --help lists, in this order; --help-all lists the others too."""
_LISTS_ALL = "paceline.lists_all_options"
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])  # typer exports no name for it


class Commands(TyperGroup):
    """All commands; a word that is none of them is answered in one line."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names.

        Raises:
            typer.Exit: there is none; the error is printed.
        """
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            hint = f" Did you mean paceline chat {args[0]}?" if args[0].lower().endswith(".gguf") or "/" in args[0] else ""
            print_error(cast(Any, error).format_message() + hint)
            raise typer.Exit(EXIT_WRONG_INPUT) from None


class Command(TyperCommand):
    """A command of paceline."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments.

        Raises:
            typer.Exit: they are wrong; the error is printed.
        """
        ctx.meta[_LISTS_ALL] = "--help-all" in args
        flags = [flag for one in self.params for flag in one.opts]
        foreign = [word for word in args if word[:1] == "-" and word not in flags and word[1:] in OTHER_NAMES]
        if foreign:  # such as -ngl, which would be read as -n gl
            print_error(self._unknown_option(foreign[0]))
            raise typer.Exit(EXIT_WRONG_INPUT)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            name = getattr(error, "option_name", None)
            is_unknown = type(error).__name__ == "NoSuchOption" and name is not None
            text = self._unknown_option(str(name)) if is_unknown else cast(Any, error).format_message().rstrip(".")
            text += ": put a text with spaces in quotes" if text.startswith("Got unexpected extra") else ""
            print_error(text if text.endswith("?") else f"{text}; {ctx.command_path} --help-all lists all options")
            raise typer.Exit(EXIT_WRONG_INPUT) from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: common options in one panel, or all options in panels by subject."""
        shown = copy(self)
        shown.params = [_shown(one) for one in self.params]
        if not ctx.meta.get(_LISTS_ALL):
            shown.params = sorted(filter(_is_common, shown.params), key=_rank)
            for option in filter(_rank, shown.params):
                option.__dict__["rich_help_panel"] = "Options"
            shown.epilog = f"{ctx.command_path} --help-all lists all options."
        super(Command, shown).format_help(ctx, formatter)

    def get_help_option(self, ctx: Any) -> Any:
        """Return the help option, in the panel of the output's options."""
        option: Any = super().get_help_option(ctx)
        option.opts = list(HELP_NAMES)
        option.help = "Show the common options and exit; --help-all: all options."
        option.rich_help_panel = "Output" if ctx.meta.get(_LISTS_ALL) else "Options"
        option.display_type_rich = _no_type
        return option

    def _unknown_option(self, name: str) -> str:
        flags = {flag: one.name for one in self.params for flag in (*one.opts, *one.secondary_opts) if flag.startswith("-")}
        ours = OTHER_NAMES.get(name.lstrip("-").replace("-", "_"))
        close = [flag for flag, owner in flags.items() if owner == ours and flag.startswith("--")][-1:]
        close = close or get_close_matches(name, flags, 1, 0.6)
        return f"there is no option {name}" + (f": did you mean {close[0]}?" if close else "")


def _shown(parameter: Any) -> Any:
    """Return a parameter as the help shows it: with one long name, and no type for a switch."""
    shown = copy(parameter)
    if parameter.param_type_name == "option":
        shown.opts = [flag for flag in parameter.opts if len(flag) == 2] + [flag for flag in parameter.opts if len(flag) > 2][-1:]
        if parameter.is_flag:
            shown.display_type_rich = _no_type
    return shown


def _no_type(ctx: Any) -> None:
    return None


def _is_common(parameter: Any) -> bool:
    return _rank(parameter) <= len(COMMON)


def _rank(parameter: Any) -> int:
    """Return the place of a parameter in the short help: 0 for arguments, above the number of common options for others."""
    if parameter.param_type_name == "argument":
        return 0
    return 1 + COMMON.index(parameter.name) if parameter.name in COMMON else 1 + len(COMMON)
