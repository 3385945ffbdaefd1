// The conversation that is open: what was said, or what an empty one may begin with, and where the next message is typed.
import { isRunning } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { Composer } from "./composer.js";
import { branchOf, versionsOf } from "./conversation.js";
import { Component, html } from "./html.js";
import { MessageView } from "./message_view.js";
import { Welcome } from "./welcome.js";

const NEAR_END_PX = 120;
const isBeingCompared = ({ comparison }) => comparison && isRunning(comparison);

export class Chat extends Component {
  // Follow a growing answer where its end is in sight; who has scrolled up stays there.
  getSnapshotBeforeUpdate() {
    return window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - NEAR_END_PX;
  }

  componentDidUpdate({ chat, isBusy }, _, wasAtEnd) {
    const isOpened = chat.id !== this.props.chat.id;
    const isRacing = [chat, this.props.chat].some((one) => one.nodes.some(isBeingCompared));
    const isGrowing = isBusy && !isRacing && chat !== this.props.chat;
    if (isOpened || (wasAtEnd && isGrowing)) window.scrollTo(0, document.documentElement.scrollHeight);
  }

  render({ chat, model, isChat, isBusy, opensTokens, actions, messageField }) {
    return html`
      ${chat.nodes.length === 0 && html`<${Welcome} send=${actions.send} ...${{ isBusy, isChat }} />`}
      ${branchOf(chat).map((node) => {
        const View = node.role === "user" ? MessageView : AnswerView;
        const name = node.answer?.fields.model ?? model?.id ?? "Answer";
        const ids = versionsOf(chat, node);
        return html`<${View} key=${node.id} ...${{ node, ids, isBusy, opensTokens, actions }} model=${name} />`;
      })}
      <${Composer} field=${messageField} ...${{ isBusy, isChat }} send=${actions.send} stop=${actions.stop} />
    `;
  }
}
