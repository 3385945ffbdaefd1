"""`paceline chat`: a conversation in the terminal."""

from typing import TYPE_CHECKING

import typer

from paceline.cli.conversation import COMMANDS, Conversation, parse_command
from paceline.cli.options import Settings, checked_text, with_settings
from paceline.cli.reporting import EXIT_INTERRUPTED, exit_code, say, say_error
from paceline.cli.run import ShowDrafts, System
from paceline.errors import CapacityError, ConfigError, PacelineError, RequestError

if TYPE_CHECKING:
    from paceline.cli.message_input import Entry, MessageInput
    from paceline.llm import LLM


@with_settings
def chat(*, system: System = None, show_drafts: ShowDrafts = False, settings: Settings) -> None:
    """Talk to the model.

    Ctrl-C stops an answer and keeps the conversation, Ctrl-D ends it; /help lists the commands. Answers go to stdout, the rest to stderr.

    A line that ends in \\ goes on in the next one, \"\"\" begins and ends a block, pasted lines are one message.

    From a pipe each line is a message; the exit code is that of the first one that could not be answered, and Ctrl-C ends it all.
    """
    adapter = settings.adapter
    conversation = Conversation(settings.sampling, None if system is None else checked_text("system", system))
    from paceline.cli.loading import load
    from paceline.cli.message_input import message_input

    with message_input() as source:
        llm = load(settings)
        if not llm.tokenizer.has_chat_template:
            raise ConfigError(
                f"{settings.engine.model} has no chat template, so it takes no messages: use a model trained for conversations (many are "
                "named -Instruct or -Chat), or complete texts with paceline run"
            )
        llm.tokenizer.check_chat_template()
        if source.is_interactive and not settings.quiet:
            say("Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands")
        Chat(llm, conversation, source, adapter=adapter, show_drafts=show_drafts, quiet=settings.quiet).run()


class Chat:
    """Reads messages until the end of input, answers each, and remembers what was said."""

    def __init__(
        self, llm: "LLM", conversation: Conversation, source: "MessageInput", *, adapter: str | None = None, show_drafts: bool, quiet: bool
    ) -> None:
        self._llm, self._adapter = llm, adapter
        self._conversation = conversation
        self._source = source
        self._show_drafts = show_drafts
        self._quiet = quiet
        self._failure: PacelineError | None = None

    def run(self) -> None:
        """Until /exit or the end of input.

        Raises:
            typer.Exit: not interactive, and a message could not be answered.
        """
        from paceline.cli.rendering import legend

        if self._show_drafts:
            say(legend())
        while True:
            try:
                if not self._take_next():
                    break
            except KeyboardInterrupt:
                if not self._source.is_interactive:  # nobody there to go on
                    raise
                say("Ctrl-D or /exit ends")
        if self._failure is not None and not self._source.is_interactive:
            raise typer.Exit(exit_code(self._failure))

    def _take_next(self) -> bool:
        """Do or answer what comes next; False = the conversation ends."""
        try:
            return self._take(self._source.next())
        except EOFError:
            return False
        except RequestError as error:  # of a command
            self._fail(error)
            return True

    def _take(self, entry: "Entry") -> bool:
        command = None if entry.is_literal else parse_command(entry.text)
        if command is None:
            if entry.text.strip():
                self._answer(entry.text)
            return True
        name, argument = command
        if name == "/exit":
            return False
        if name == "/retry":
            self._retry()
        elif (do := COMMANDS[name].do) is not None:
            say(do(self._conversation, argument))
        return True

    def _fail(self, error: PacelineError) -> None:
        self._failure = self._failure or error
        say_error(error)

    def _retry(self) -> None:
        params, was_answered = self._conversation.params, self._conversation.taken_back is None
        text = self._conversation.message_to_retry()
        if was_answered and (params.is_greedy or params.seed is not None):
            way_out = "/set temperature 0.7" if params.is_greedy else "/set seed none"
            say(f"the same answer will come again; {way_out} makes it another one")
        self._answer(text)

    def _answer(self, text: str) -> None:
        """One turn. A turn that cannot be served is taken back; an answer cut short by Ctrl-C stays as it is.

        Raises:
            typer.Exit: Ctrl-C, and nobody there to go on.
        """
        from paceline.cli.rendering import Answer, write_stream, writer_for

        conversation = self._conversation
        answer: Answer | None
        conversation.taken_back = text
        try:
            messages = [*conversation.messages, {"role": "user", "content": checked_text("message", text)}]
            stream = self._llm.stream_chat(messages, conversation.params, adapter=self._adapter)
            answer = write_stream(stream, writer_for(self._llm, show_drafts=self._show_drafts))
        except (RequestError, CapacityError) as error:
            self._fail(error)
            if self._source.is_interactive:
                say("this message was taken back; /retry sends it again, /reset forgets the conversation")
            return
        except KeyboardInterrupt:  # before the stream began
            answer = None
        if answer is None or (answer.interrupted and not answer.text):
            say("interrupted; /retry sends the message again")
        else:
            conversation.taken_back = None
            conversation.turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer.text}]
            if not self._quiet:
                say(answer.closing_line(sampled=not conversation.params.is_greedy))
        if (answer is None or answer.interrupted) and not self._source.is_interactive:
            raise typer.Exit(EXIT_INTERRUPTED)
