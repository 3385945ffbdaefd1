"""A proof as text: the verdict in one line, the first differences, and in detail the table of counts."""

import shlex

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.errors import printable
from paceline.proof.exactness.compare import Finding
from paceline.proof.exactness.prove import Proof
from paceline.proof.exactness.run_case import Counts

_MOST_SHOWN = 5
_COLUMNS = ("answers", "tokens", "accepted", "near-ties", "bugs")
_SHORT = {"num_speculative_tokens": "draft tokens"}


def report(proof: Proof, *, details: bool) -> Group:
    """Return the findings and the verdict; in detail also the table of counts and the comparison with transformers."""
    parts: list[RenderableType] = [_table(proof)] if details else []
    bugs = proof.bugs
    near_ties = [one for one in proof.findings if one not in bugs]
    parts += [line for finding in [*bugs[:_MOST_SHOWN], *near_ties[:1]] for line in _finding_lines(proof, finding)]
    parts += [Text(printable(_transformers_line(proof)))] * details
    parts.append(_verdict(proof))
    return Group(*parts)


def _table(proof: Proof) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for dimension, levels in proof.tally.by.items():
        for number, (level, counts) in enumerate(levels.items()):
            table.add_row(
                Text(_SHORT.get(dimension, dimension) if number == 0 else "", style="bold"), Text(printable(level)), *_cells(counts)
            )
    table.add_row(Text("all", style="bold"), f"{proof.tally.cases} cases", *_cells(proof.tally.all))
    return table


def _cells(counts: Counts) -> list[Text]:
    numbers = (counts.requests, counts.tokens, counts.accepted, counts.near_ties, counts.bugs)
    styles = ("", "", "", "yellow" if counts.near_ties else "", "bold red" if counts.bugs else "")
    return [Text(f"{number:,}", style=style) for number, style in zip(numbers, styles, strict=True)]


def _finding_lines(proof: Proof, finding: Finding) -> list[Text]:
    is_bug = finding in proof.bugs
    title = Text("BUG" if is_bug else "near-tie", style="bold red" if is_bug else "yellow")
    lines = [Text.assemble(title, " ", printable(headline(finding)))]
    case = proof.cases.get(finding.case) if finding.case is not None else None
    if case is not None:
        setting = case.setting
        line = f"  {setting.num_speculative_tokens} draft tokens, {setting.shape}, batch of {setting.batch}, {setting.event}"
        if finding.request is not None:
            request = case.requests[finding.request]
            line += f"; {request.sampling}, drafter {request.drafter}, {request.prompt} ({len(request.prompt_token_ids)} tokens)"
        lines.append(Text(printable(line)))
        lines.append(Text(f"  repeat: {printable(shlex.join(proof.repeat(finding)))}"))
    return lines


def headline(finding: Finding) -> str:
    """Return one line about a difference."""
    parts = [finding.kind.value]
    if finding.case is not None:
        parts.append(f"case {finding.case}" + ("" if finding.request is None else f", request {finding.request}"))
    if finding.position is not None:
        parts.append(f"position {finding.position}")
    if finding.plain_token is not None and finding.plain_token != finding.token:
        parts.append(f"plain {_token(finding.plain_token, finding.plain_logprob)}, here {_token(finding.token, finding.logprob)}")
    if finding.rows_differ_by is not None:
        parts.append(f"logits differ by {finding.rows_differ_by:.3g}, bound {finding.bound:.3g}")
    return f"{'; '.join(parts)}: {finding.details}"


def _token(token: int | None, logprob: float | None) -> str:
    return f"{token}" if logprob is None else f"{token} (logprob {logprob:.4f})"


def _transformers_line(proof: Proof) -> str:
    found = proof.transformers
    if found.status == "not_compared":
        return f"transformers: not compared ({found.reason})"
    return (
        f"transformers: {found.status}; {found.argmax_equal} of {found.positions} most probable tokens are the same, "
        f"{found.near_ties} differ at near-ties, {found.differing} elsewhere; logits differ by at most {found.max_abs_difference:.3g}"
    )


def _verdict(proof: Proof) -> Text:
    counts = proof.tally.all
    tokens = f"{counts.tokens:,}" + ("" if proof.is_whole or proof.bugs else f" of {proof.num_tokens:,} planned") + " tokens"
    what = f"{tokens} and {counts.rows:,} rows of logits compared in {proof.seconds:.0f} s, numerics {proof.numerics}; seed {proof.seed}"
    if proof.bugs:
        return Text.assemble((f"{len(proof.bugs)} BUG{'S' if len(proof.bugs) > 1 else ''}", "bold red"), f": {what}")
    if proof.verdict == "near-ties":
        near = f"no bug, {counts.near_ties} near-ties"
        return Text.assemble((near, "bold yellow"), f": {what}; less than {proof.noise_bound:.3g} is noise")
    return Text.assemble((proof.verdict, "bold green" if proof.verdict == "equal" else "bold"), f": {what}")
