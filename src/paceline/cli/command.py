"""How each command parses its arguments: help in two lengths, and wrong usage as one line with the nearest name."""

import re
from copy import copy
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from paceline.cli.other_programs import OTHER_COMMANDS, OTHER_OPTIONS
from paceline.cli.reporting import EXIT_WRONG_INPUT, print_error
from paceline.spelling import OTHER_NAMES

HELP_NAMES = ("-h", "--help", "--help-all")
COMMON = [
    "model", "prompt_option", "chat", "system", "host", "port", "api_key", "served_model_name", "quick", "prompts", "workload", "peer",
    "probe", "fetch", "memory_gb", "tokens", "max_tokens", "temperature", "drafter", "draft_model", "num_speculative_tokens", "data",
    "eval_data", "minutes", "resume", "threads", "max_model_len", "explain", "details", "as_json", "json_file", "output",
]  # fmt: skip
"""Options that --help lists, in this order; --help-all lists the others too."""
_LISTS_ALL = "paceline.lists_all_options"
_ONE_DASH = re.compile(r"-[A-Za-z][\w-]+")
_NO_NUMBER = re.compile(r"Invalid value for (.*'): Input should be a valid (integer|number).*")  # typer's text
_WHOLE_NUMBERS = ("max_tokens", "threads", "max_model_len")  # options with a short form such as -n9
_CUTOFF = 0.7  # below, the nearest name is hardly ever the one that was meant
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])  # typer exports no name for it


class Commands(TyperGroup):
    """All commands; a word that is none of them is answered in one line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what precedes the command.

        Raises:
            typer.Exit: it is an option of a command, as for a program that has no commands; the error is printed.
        """
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            name = getattr(error, "option_name", None)
            if name is None:
                raise
            text = f'{name} is given without a command: paceline run MODEL "TEXT" completes a text, paceline chat MODEL is a conversation'
            print_error(f"{text}. Commands: {', '.join(self.list_commands(ctx))}")
            raise typer.Exit(EXIT_WRONG_INPUT) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names.

        Raises:
            typer.Exit: there is none; the error is printed.
        """
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            text = cast(Any, error).format_message()
            if args[0] in OTHER_COMMANDS:
                text = f"No such command {args[0]!r}: {OTHER_COMMANDS[args[0]]}."
            elif args[0].lower().endswith(".gguf") or "/" in args[0]:
                text += f" Did you mean paceline chat {args[0]}?"
            print_error(text if text.endswith("?") else f"{text} Commands: {', '.join(self.list_commands(ctx))}")
            raise typer.Exit(EXIT_WRONG_INPUT) from None


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments.

        Raises:
            typer.Exit: they are wrong; the error is printed.
        """
        ctx.meta[_LISTS_ALL] = "--help-all" in args
        typed = list(args)  # parsing empties the list
        foreign = self._foreign_word(args)
        if foreign is not None:
            print_error(self._with_pointer(ctx, self._unknown_option(foreign)))
            raise typer.Exit(EXIT_WRONG_INPUT)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            print_error(self._with_pointer(ctx, self._usage_text(error, typed)))
            raise typer.Exit(EXIT_WRONG_INPUT) from None

    def _foreign_word(self, args: list[str]) -> str | None:
        """Return the first word such as -ngl, which would be read as the options -n gl; None if there is none."""
        owners = {flag: one for one in self.params for flag in (*one.opts, *one.secondary_opts)}
        is_value = False
        for word in args:
            name = word.partition("=")[0]
            owner: Any = owners.get(name)
            if word == "--":
                return None
            if not is_value and owner is None and _ONE_DASH.fullmatch(name) and self._is_foreign(name, owners):
                return name
            is_value = not is_value and owner is not None and not owner.is_flag and "=" not in word
        return None

    def _is_foreign(self, name: str, owners: dict[str, Any]) -> bool:
        """Return whether a word with one dash is no short option with its value, such as -n9, nor several switches."""
        short = owners.get(name[:2])
        if short is None or name[1:] in OTHER_OPTIONS or name[1:] in OTHER_NAMES:
            return True
        return short.name in _WHOLE_NUMBERS and not name[2:].isdigit()

    def _usage_text(self, error: Exception, args: list[str]) -> str:
        name = getattr(error, "option_name", None)
        if type(error).__name__ == "NoSuchOption" and name is not None:
            return self._unknown_option(str(name))
        text: str = cast(Any, error).format_message().rstrip(".")
        wrong = _NO_NUMBER.fullmatch(text)
        if wrong is not None:
            flags = re.findall(r"'(-[^']+)'", wrong[1])
            value = next((value for flag, value in pairwise(args) if flag in flags), None)
            kind = "whole number" if wrong[2] == "integer" else "number"
            return f"{flags[-1]} is {'no number' if value is None else repr(value)}: use a {kind}"
        return text + (": put a text with spaces in quotes" if text.startswith("Got unexpected extra") else "")

    def _with_pointer(self, ctx: Any, text: str) -> str:
        return text if text.endswith("?") else f"{text}; {ctx.command_path} --help-all lists all options"

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help: common options in one panel, or all options in panels by subject."""
        shown = copy(self)
        shown.params = [_shown(one) for one in self.params]
        if not ctx.meta.get(_LISTS_ALL):
            shown.params = sorted((one for one in shown.params if _rank(one) <= len(COMMON)), key=_rank)
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
        hint = OTHER_OPTIONS.get(name.lstrip("-").replace("_", "-"), "")
        if " " in hint:
            return f"there is no option {name}: {hint}"
        ours = OTHER_NAMES.get(name.lstrip("-").replace("-", "_"))
        close = [flag for flag, owner in flags.items() if owner == ours and flag.startswith("--")][-1:]
        close = [flag for flag in flags if flag == hint] or close or get_close_matches(name, flags, 1, _CUTOFF)
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


def _rank(parameter: Any) -> int:
    """Return the place of a parameter in the short help: 0 for arguments, above the number of common options for others."""
    if parameter.param_type_name == "argument":
        return 0
    return 1 + COMMON.index(parameter.name) if parameter.name in COMMON else 1 + len(COMMON)
