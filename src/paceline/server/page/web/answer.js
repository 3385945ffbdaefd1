// One answer while it comes and when it is there. Values: every change makes a new one.

export const WAITING = "waiting";
export const STREAMING = "streaming";
export const DONE = "done";
export const STOPPED = "stopped"; // by the person in front of the page
export const LOST = "lost"; // the connection broke
export const FAILED = "failed"; // the server said why

// `fields` are those of the request without its messages: these follow from the branch, and from the system prompt of that time.
// Without `isChat` the model has no chat template: it continues the text of all messages.
export function newAnswer(fields, system, isChat) {
  const numbers = { finishReason: null, stats: null, firstMs: 0, lastMs: 0 };
  return { fields, system, isChat, status: WAITING, text: "", thoughts: "", steps: [], error: null, ...numbers };
}

export function isRunning(answer) {
  return answer.status === WAITING || answer.status === STREAMING;
}

// An answer after one event of its stream, which came at `nowMs`.
export function withEvent(answer, event, nowMs) {
  const next = { ...answer, status: STREAMING };
  const [choice] = event.choices;
  next.text += choice?.delta?.content ?? choice?.text ?? "";
  next.thoughts += choice?.delta?.reasoning_content ?? "";
  next.finishReason = choice?.finish_reason ?? answer.finishReason;
  if (event.usage) next.stats = event.speculation;
  else if (event.speculation) {
    next.firstMs ||= nowMs;
    next.lastMs = nowMs;
    next.steps = [...answer.steps, ...stepsOf(event.speculation, nowMs - next.firstMs)];
  }
  return next;
}

// Steps with the tokens they emitted: {start, tokens, drafts, skipReason, atMs}. A draft is {token, parent, source, isAccepted}, node
// i + 1 of its tree, whose node 0 is the token before the step. `atMs` is when the step came, counted from the first one.
function stepsOf({ token_ids, texts, origins, trees }, atMs) {
  let place = 0;
  return trees.map((tree) => {
    const tokens = tree.token_ids.map(() => {
      const token = { id: token_ids[place], text: texts[place], origin: origins[place] };
      place += 1;
      return token;
    });
    const drafts = tree.draft_token_ids.map((id, index) => ({
      token: { id, text: tree.draft_texts[index] },
      parent: tree.parents[index],
      source: tree.sources[index],
      isAccepted: tree.accepted_nodes.includes(index + 1),
    }));
    return { start: tree.start, tokens, drafts, skipReason: tree.skip_reason, atMs };
  });
}

export function tokensOf(answer) {
  return answer.steps.flatMap((step) => step.tokens);
}

// Counts and rates, by the server's clock if there is its time, else by this page's.
export function numbersOf(answer, byServer = answer.stats !== null) {
  const numTokens = answer.steps.reduce((sum, step) => sum + step.tokens.length, 0);
  const drafted = answer.steps.reduce((sum, step) => sum + step.drafts.length, 0);
  const accepted = tokensOf(answer).filter((token) => token.origin === "accepted").length;
  const decodeS = byServer ? answer.stats.timing.decode_s : (answer.lastMs - answer.firstMs) / 1000;
  const behindFirst = numTokens - (answer.steps[0]?.tokens.length ?? 0);
  return {
    numTokens,
    numSteps: answer.steps.length,
    drafted,
    accepted,
    decodeS,
    tokensPerS: decodeS > 0 ? behindFirst / decodeS : null,
    meanAcceptanceLength: answer.steps.length ? numTokens / answer.steps.length : null,
  };
}

// The numbers of an answer in one line.
export function summaryOf(answer) {
  const { numTokens, tokensPerS, meanAcceptanceLength } = numbersOf(answer);
  const rate = tokensPerS && `${rateOf(tokensPerS)} tokens/s`;
  return [`${numTokens} tokens`, rate, `${meanAcceptanceLength.toFixed(1)} tokens a step`].filter(Boolean).join(" · ");
}

export function rateOf(tokensPerS) {
  return tokensPerS.toFixed(tokensPerS < 100 ? 1 : 0);
}

// Where two answers differ first: {index, left, right}, tokens that are missing being null; null where they do not.
export function firstDifference(left, right) {
  const [ours, theirs] = [tokensOf(left), tokensOf(right)];
  const length = Math.max(ours.length, theirs.length);
  for (let index = 0; index < length; index += 1) {
    if (ours[index]?.id !== theirs[index]?.id) return { index, left: ours[index] ?? null, right: theirs[index] ?? null };
  }
  return null;
}

// How a token is spelled where spaces and line ends must be seen; parts of characters come as bytes:\xe2\x82.
export function spelled(text) {
  if (text.startsWith("bytes:\\x")) return `⟨${text.slice("bytes:\\x".length).replaceAll("\\x", " ")}⟩`;
  return text.replaceAll("\n", "↵").replaceAll("\t", "→");
}
