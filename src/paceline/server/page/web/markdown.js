// From a model's text to markup that does nothing: HTML in it is shown as text, images are not loaded, links lead to web pages only.
// Code is coloured where its fence names its language, and has a button that copies it.
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import DOMPurify from "./vendor/purify.es.mjs";
import highlighter from "./vendor/highlight.min.js";
import { Component, html } from "./html.js";

const WEB_ADDRESS = /^(https?:\/\/|mailto:)/i;
const ALLOWED = {
  ALLOWED_TAGS: "a blockquote br button code div em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul".split(
    " ",
  ),
  ALLOWED_ATTR: ["class", "href", "rel", "start", "tabindex", "target", "type"],
  ALLOWED_URI_REGEXP: WEB_ADDRESS,
  ADD_URI_SAFE_ATTR: ["rel", "start", "tabindex", "target", "type"], // no addresses
  RETURN_TRUSTED_TYPE: true,
};
const MAX_COLOURED_CHARS = 50_000; // it is coloured anew whenever more of it has come
const COPIED_MS = 2000;

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
const { escapeHtml } = markdown.utils;
markdown.disable("image");
markdown.validateLink = (address) => WEB_ADDRESS.test(address.trim());
markdown.renderer.rules.link_open = (tokens, index, options, _, renderer) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer nofollow");
  return renderer.renderToken(tokens, index, options);
};
markdown.renderer.rules.table_open = () => '<table tabindex="0">\n'; // it may scroll
markdown.renderer.rules.fence = (tokens, index) => codeBlock(tokens[index].content, tokens[index].info.trim().split(/\s+/)[0]);
markdown.renderer.rules.code_block = (tokens, index) => codeBlock(tokens[index].content, "");

function codeBlock(code, language) {
  const isColoured = highlighter.getLanguage(language) && code.length <= MAX_COLOURED_CHARS;
  const body = isColoured ? highlighter.highlight(code, { language, ignoreIllegals: true }).value : escapeHtml(code);
  const copy = navigator.clipboard ? '<button type="button" class="copy">Copy code</button>' : "";
  const head = `<div class="code-head"><span>${escapeHtml(language)}</span>${copy}</div>`;
  return `<div class="code">${head}<pre tabindex="0"><code>${body}</code></pre></div>\n`;
}

export class Markdown extends Component {
  shouldComponentUpdate({ text }) {
    return text !== this.props.text;
  }

  copy = async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    await navigator.clipboard.writeText(button.closest(".code").querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => {
      button.textContent = "Copy code";
    }, COPIED_MS);
  };

  render({ text }) {
    const __html = DOMPurify.sanitize(markdown.render(text), ALLOWED);
    return html`<div class="markdown" onClick=${this.copy} dangerouslySetInnerHTML=${{ __html }} />`;
  }
}
