// From a model's text to markup that does nothing: HTML in it is shown as text, images are not loaded, links lead to web pages only.
import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import DOMPurify from "./vendor/purify.es.mjs";
import { Component, html } from "./html.js";

const WEB_ADDRESS = /^(https?:\/\/|mailto:)/i;
const ALLOWED = {
  ALLOWED_TAGS: "a blockquote br code em h1 h2 h3 h4 h5 h6 hr li ol p pre s strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["href", "rel", "start", "target"],
  ALLOWED_URI_REGEXP: WEB_ADDRESS,
  ADD_URI_SAFE_ATTR: ["rel", "start", "target"], // no addresses
  RETURN_TRUSTED_TYPE: true,
};

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
markdown.disable("image");
markdown.validateLink = (address) => WEB_ADDRESS.test(address.trim());
markdown.renderer.rules.link_open = (tokens, index, options, _, renderer) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer nofollow");
  return renderer.renderToken(tokens, index, options);
};

export class Markdown extends Component {
  shouldComponentUpdate({ text }) {
    return text !== this.props.text;
  }

  render({ text }) {
    return html`<div class="markdown" dangerouslySetInnerHTML=${{ __html: DOMPurify.sanitize(markdown.render(text), ALLOWED) }} />`;
  }
}
