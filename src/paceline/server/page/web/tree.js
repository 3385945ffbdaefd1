// The draft tree of one step: its tokens, which of them were accepted, and the model's own token after those.
import { Component, createRef, html } from "./html.js";
import { spelled } from "./answer.js";

const MARKS = { accepted: "✓", rejected: "✕", bonus: "★", plain: "", root: "" };
const SKIP_REASONS = {
  off: "speculation is off",
  prompt: "the prompt's last pass",
  resumed: "the last pass over tokens whose cache rows had been evicted",
  no_match: "no drafter had a draft",
  unprofitable: "drafting was not expected to pay",
  no_room: "the end of the context or of max_tokens",
  pass_full: "the pass was full of other rows",
  no_memory: "no cache block was free for draft tokens",
  drafter_failed: "the drafter failed",
  unusable: "no drafted token was usable",
};
const SPOKEN = { accepted: "accepted", rejected: "not accepted", bonus: "bonus", plain: "plain", root: "the token in front" };

export class Tree extends Component {
  constructor() {
    super();
    this.section = createRef();
  }

  componentDidMount() {
    this.section.current.scrollIntoView({ block: "nearest" });
  }

  closeByKey = (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault(); // the settings stay open
    this.props.close();
  };

  render({ step, root, number, close }) {
    const top = { token: root ?? { text: "…" }, kind: "root", children: childrenOf(step, 0) };
    return html`<section class="tree" ref=${this.section} aria-label="Draft tree of step ${number}" onKeyDown=${this.closeByKey}>
      <header>
        <h3>Step ${number}</h3>
        <p>${summary(step)}</p>
        <button type="button" class="quiet" onClick=${close} aria-label="Close the draft tree">✕</button>
      </header>
      <div class="scrolls" role="group" tabindex="0" aria-label="The tree, from left to right">
        <ul><${Node} node=${top} /></ul>
      </div>
    </section>`;
  }
}

function Node({ node: { token, kind, source, children } }) {
  const title = [SPOKEN[kind], source && `drafted by ${source}`, token.id !== undefined && `id ${token.id}`].filter(Boolean).join(", ");
  return html`<li class=${kind}>
    <span class="node ${kind}" title=${title}>
      <span class="text">${spelled(token.text)}</span>
      <span class="mark" aria-hidden="true">${MARKS[kind]}</span>
      <span class="visually-hidden">, ${SPOKEN[kind]}</span>
    </span>
    ${children.length > 0 && html`<ul>${children.map((child, place) => html`<${Node} key=${place} node=${child} />`)}</ul>`}
  </li>`;
}

// The children of a node, the accepted one first; the model's own token follows the last accepted one.
function childrenOf(step, parent) {
  const isKept = parent === 0 || step.drafts[parent - 1].isAccepted;
  const children = step.drafts.flatMap((draft, index) => {
    if (draft.parent !== parent) return [];
    const kind = draft.isAccepted ? "accepted" : "rejected";
    return [{ token: draft.token, source: draft.source, kind, children: childrenOf(step, index + 1) }];
  });
  children.sort((left, right) => (right.kind === "accepted") - (left.kind === "accepted"));
  const own = step.tokens.at(-1);
  const isLast = isKept && !children.some((child) => child.kind === "accepted");
  return isLast && own.origin !== "accepted" ? [{ token: own, kind: own.origin, children: [] }, ...children] : children;
}

function summary(step) {
  if (step.skipReason) return `No draft: ${SKIP_REASONS[step.skipReason] ?? step.skipReason}.`;
  const accepted = step.drafts.filter((draft) => draft.isAccepted).length;
  const sources = [...new Set(step.drafts.map((draft) => draft.source))].join(", ");
  return `${step.drafts.length} drafted by ${sources}, ${accepted} accepted; one pass of the model gave ${step.tokens.length} ${step.tokens.length === 1 ? "token" : "tokens"}.`;
}
