"""Fields of all APIs that are not served: which are ignored and which are refused, by API and kind of object.

The served fields are declared by the pydantic models of the requests (`Fields`). A field that is in neither is unknown:
`ServerSettings.unknown_fields` decides whether it is ignored or refused. tools/list_server_tables.py lists both in docs/server.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNSET_VALUES: tuple[Any, ...] = (None, False, "", [], {})
"""Values by which a field requests nothing."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused.

    Attributes:
        ignored_values: values that are ignored, because they request what the server does anyway.
        only_with: it is refused only where one of these fields of the same object is neither missing nor 0 nor 1.
        equal_to: a field of the same object; the same value as there is ignored.
    """

    reason: str
    ignored_values: tuple[Any, ...] = UNSET_VALUES
    only_with: tuple[str, ...] = ()
    equal_to: str | None = None

    def applies(self, value: object, given: Mapping[str, Any]) -> bool:
        """Whether `value` is refused in the object `given`."""
        if value in self.ignored_values or (self.equal_to is not None and value == given.get(self.equal_to)):
            return False
        return not self.only_with or any(given.get(name) not in (None, 0, 1) for name in self.only_with)


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Fields of one kind of object that are not served.

    Attributes:
        ignored: they do not change the answer.
        refused: they request something that this server does not do.
    """

    ignored: frozenset[str] = frozenset()
    refused: Mapping[str, Refusal] = field(default_factory=dict)

    def __or__(self, other: "FieldRules") -> "FieldRules":
        return FieldRules(self.ignored | other.ignored, {**self.refused, **other.refused})


def _ignored(*lines: str) -> FieldRules:
    return FieldRules(frozenset(" ".join(lines).split()))


def _refused(reason: str, names: str, *also_ignored: Any) -> FieldRules:
    return FieldRules(refused={name: Refusal(reason, (*UNSET_VALUES, *also_ignored)) for name in names.split()})


_TEXT_ONLY = "this server reads and writes text only"
_OLD_TOOLS = "it is the old form of tools; send tools"
_NOT_STORED = "nothing is stored; send the whole conversation"
_NO_OUTGOING = "this server reaches no other one"
_NO_SAMPLER = "there is no such sampler; use temperature, top_k, top_p and min_p"
_PENALTIES = ("repeat_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty")
_OWN_TEMPLATE = "the model has its own chat template"

LEFTOVERS = _ignored("cache_control extra_content provider_specific_fields metadata id")
"""Fields that SDKs, gateways and programs leave in the objects of a request, whatever the API."""
REQUEST = _ignored(
    "user metadata user_id session_id request_id trace_id trace service_tier safety_identifier prompt_cache_key prompt_cache_retention",
    "prompt_cache_options store client_metadata extra_headers extra_query extra_body timeout api_key api_base num_retries",
    "litellm_metadata litellm_session_id litellm_call_id litellm_trace_id keep_alive betas cache_prompt id_slot slot_id n_keep n_discard",
    "n_indent t_max_predict_ms timings_per_token return_progress post_sampling_probs verbose priority watermarking",
    "kv_transfer_params ec_transfer_params vllm_xargs mm_processor_kwargs media_io_kwargs spaces_between_special_tokens",
    "guided_decoding_backend return_token_offsets return_mm_kwargs routed_experts_prompt_start stream_interval rid custom_params",
    "separate_reasoning stream_reasoning no_stop_trim backend provider models route usage include_usage",
) | FieldRules(
    refused={
        "skip_special_tokens": Refusal("special tokens are never part of an answer's text", (None, True)),
        "include_reasoning": Refusal("reasoning is always part of an answer; leave the field out", (None, True)),
        "parse_tool_calls": Refusal("calls are always read; serve with --tool-call-parser none", (None, True)),
    }
)
OTHER_SAMPLERS = FieldRules(
    refused={
        "typical_p": Refusal(_NO_SAMPLER, (*UNSET_VALUES, 1)),
        "typical": Refusal(_NO_SAMPLER, (*UNSET_VALUES, 1)),
        "tfs_z": Refusal(_NO_SAMPLER, (*UNSET_VALUES, 1)),
        "length_penalty": Refusal("there is no beam search", (*UNSET_VALUES, 1)),
        "samplers": Refusal("the order of samplers is fixed"),
        "penalize_nl": Refusal("penalties count every token", (None, True)),
        "repeat_last_n": Refusal("penalties count the whole text; leave it out", (None, -1), _PENALTIES),
    }
) | _refused(_NO_SAMPLER, "mirostat dynatemp_range xtc_probability dry_multiplier top_n_sigma top_a adaptive_target", -1.0)
OTHER_SAMPLERS |= _ignored(  # parameters of the samplers above
    "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers",
    "adaptive_decay min_keep",
)
TEXT_REQUEST = (
    REQUEST
    | OTHER_SAMPLERS
    | _refused("there is no beam search; request n samples", "use_beam_search num_beams early_stopping", 1)
    | FieldRules(refused={"best_of": Refusal("there is no beam search; request n samples", (*UNSET_VALUES, 1), equal_to="n")})
    | _refused("send logprobs", "n_probs logprob_token_ids return_tokens_as_token_ids")
    | _refused("send a regex or choices", "allowed_token_ids")
    | _refused("send max_tokens", "max_new_tokens max_output_tokens max_length num_predict")
    | _refused("send stop", "stop_sequences stop_words stop_strings")
    | _refused("send seed", "random_seed random_state")
    | _refused("speculation.origins lists the token ids of an answer", "return_tokens return_token_ids return_prompt_text")
    | _refused("a prompt is never cut; shorten it", "truncate_prompt_tokens transforms")
    | _ignored("truncation_side")
    | _refused("adapters are requested as the model", "lora lora_path")
    | _refused("send json_schema, regex or a Lark grammar", "grammar_lazy grammar_triggers preserved_tokens ebnf")
    | _refused("whitespace of JSON is fixed", "guided_whitespace_pattern")
    | _refused("answers end by themselves, by stop or by a limit", "repetition_detection")
    | _ignored("thinking_token_budget thinking_budget reasoning_budget")  # max_tokens limits reasoning and text together
    | _refused("code of a request is never run", "logits_processors custom_logit_processor logits_processor")
    | _refused("hidden states are not sent", "return_hidden_states")
    | _refused(_TEXT_ONLY, "multimodal_data image_data audio_data prompt_embeds")
)

TABLE: Mapping[str, Mapping[str, FieldRules]] = {
    "chat": {
        "": TEXT_REQUEST
        | _ignored("reasoning_split enable_search")
        | _refused(_OLD_TOOLS, "functions function_call", "none")
        | _refused(_TEXT_ONLY, "audio")
        | _refused(_TEXT_ONLY, "modalities", ["text"])
        | _refused(_NO_OUTGOING, "web_search_options moderation plugins search_parameters")
        | _refused("no chat template has a variable for it; write it in a message", "verbosity", "medium")
        | _refused("a message is continued by continue_final_message", "echo")
        | _refused("the chat template adds what the prompt needs", "add_special_tokens")
        | _refused(_OWN_TEMPLATE, "chat_template safe_prompt")
        | _refused("serve with --reasoning-parser", "reasoning_format thinking_forced_open chat_format", "auto", "deepseek")
        | _refused("chat templates have no place for them; put them into a message", "documents"),
        "messages[]": LEFTOVERS
        | _ignored(
            "parsed annotations reasoning_details thinking_blocks reasoning_signature signature thought_signature thought",
            "encrypted_content status phase finish_reason stop_reason created_at timestamp created model usage index logprobs token_ids",
            "weight token_count is_error error citations sources context data event recipient channel experimental_attachments parts files",
            "additional_kwargs response_metadata usage_metadata invalid_tool_calls example lc_attributes",
        )
        | _refused(_OLD_TOOLS, "function_call")
        | _refused(_TEXT_ONLY, "audio images"),
        "messages[].content[]": LEFTOVERS
        | _ignored("annotations logprobs signature index prompt_cache_breakpoint citations")
        | _refused(_TEXT_ONLY, "image_url input_audio file video_url audio_url image"),
        "messages[].tool_calls[]": LEFTOVERS | _ignored("parsed_arguments index thought_signature signature status result args output"),
        "messages[].tool_calls[].function": LEFTOVERS | _ignored("parsed_arguments index description parsed strict thought_signature"),
        "tools[]": LEFTOVERS | _ignored("strict"),
        "tools[].function": LEFTOVERS | _ignored("return returns response type title examples"),
        "response_format": _ignored("strict name description"),
        "stream_options": _ignored("include_obfuscation continuous_usage_stats"),
        "structured_outputs": FieldRules(
            ignored=frozenset({"disable_fallback", "disable_any_whitespace", "backend"}),
            refused={
                "whitespace_pattern": Refusal("whitespace of JSON is fixed"),
                "disable_additional_properties": Refusal("write additionalProperties in the schema"),
            },
        ),
        "thinking": _ignored("budget_tokens display clear_thinking"),
        "reasoning": _ignored("max_tokens exclude summary"),
        "prediction": FieldRules(),
        "speculation": FieldRules(),
    },
    "completions": {
        "": TEXT_REQUEST
        | _refused("the model continues a text, it fills no gap", "suffix input_prefix input_suffix input_extra")
        | _refused("completions have no tools; send them to /v1/chat/completions", "tools tool_choice", "none")
        | FieldRules(refused={"add_special_tokens": Refusal("send token ids to leave special tokens out", (None, True))})
    },
    "tokenize": {
        "": REQUEST | _refused("pieces are always the text of a token", "return_offsets") | _refused(_OWN_TEMPLATE, "chat_template"),
        "detokenize": REQUEST,
    },
    "responses": {
        "": REQUEST
        | OTHER_SAMPLERS
        | _ignored("max_tool_calls stream_options stream_id use_websocket generate")
        | _refused(_NOT_STORED, "previous_response_id conversation prompt")
        | _refused("answers are not kept for later; stream them", "background")
        | _refused("send the request to /v1/chat/completions", "top_logprobs")
        | _refused(_NO_OUTGOING, "moderation")
        | _refused("send max_output_tokens", "max_tokens max_completion_tokens")
        | _refused("send text.format", "response_format structured_outputs guided_json")
        | _refused("send reasoning.effort", "reasoning_effort")
        | _refused("nothing is left out of a conversation; send what the model shall see", "context_management")
        | _refused("nothing is left out of a conversation; send what the model shall see", "truncation", "disabled")
        | _refused(_TEXT_ONLY, "modalities", ["text"]),
        "input[]": LEFTOVERS
        | _ignored("status phase annotations created_by encrypted_content parsed parsed_arguments namespace agent internal_chat_message")
        | _ignored("end_turn provider_data caller"),
        "input[].content[]": LEFTOVERS | _ignored("annotations logprobs parsed prompt_cache_breakpoint detail index"),
        "tools[]": LEFTOVERS | _ignored("output_schema output_type") | _refused("the model gets all tools at once", "defer_loading"),
        "text": _refused("no chat template has a variable for it; write it in instructions", "verbosity", "medium"),
        "reasoning": _ignored("summary generate_summary enabled max_tokens exclude context"),  # reasoning is sent as it is
    },
    "messages": {
        "": REQUEST
        | OTHER_SAMPLERS
        | _ignored("cache_control anthropic_version anthropic_beta diagnostics inference_geo citations fallbacks user_profile_id")
        | _refused("this server runs nothing", "container")
        | _refused("send max_tokens", "max_tokens_to_sample max_completion_tokens")
        | _refused("send stop_sequences", "stop")
        | _refused(_NO_OUTGOING, "mcp_servers")
        | _refused("there is one speed", "speed", "standard"),
        "messages[]": LEFTOVERS | _ignored("model type usage stop_reason stop_sequence name timestamp stop_details container"),
        "content[]": LEFTOVERS
        | _ignored("citations signature caller data index name status input_raw thinking_tokens is_error parsed_output title context"),
        "tools[]": LEFTOVERS
        | _ignored("eager_input_streaming max_characters allowed_callers")
        | _refused("the model gets all tools at once", "defer_loading")
        | _refused("chat templates have no place for them; put them into the description", "input_examples"),
        "tool_choice": FieldRules(),
        "thinking": _ignored("budget_tokens display"),  # max_tokens limits reasoning and text together
        "output_config": _ignored("task_budget"),
        "output_config.format": _ignored("name"),
        "context_management": FieldRules(),
    },
    "ollama": {
        "": REQUEST
        | _ignored("keep_alive truncate shift _debug_render_only")
        | _refused("the model continues a text, it fills no gap", "suffix")
        | _refused("the model has its own; send raw=true with a text that is rendered already", "template")
        | _refused("send the conversation to /api/chat", "context")
        | _refused(_TEXT_ONLY, "images width height steps"),
        "messages[]": LEFTOVERS
        | _ignored("name done done_reason created_at model eval_count timestamp files reasoning_content reasoning status")
        | _refused(_TEXT_ONLY, "images"),
        "messages[].tool_calls[]": LEFTOVERS | _ignored("index type"),
        "messages[].tool_calls[].function": LEFTOVERS | _ignored("index description"),
        "tools[]": LEFTOVERS | _ignored("items"),
        "tools[].function": LEFTOVERS | _ignored("strict return returns type title"),
        "options": OTHER_SAMPLERS
        | _ignored(  # options for loading a model: the server loads its model once, when it starts
            "num_keep num_batch num_gpu main_gpu num_thread numa low_vram f16_kv logits_all vocab_only use_mmap use_mlock embedding_only",
            "num_gqa rope_frequency_base rope_frequency_scale draft_num_predict",
        )
        | FieldRules(refused={"penalize_newline": Refusal("penalties count every token", (None, True))}),
        "show": REQUEST | _ignored("verbose system template options"),
    },
    "adapters": {
        "load": _ignored("lora_int_id base_model_name is_3d_lora_weight")
        | _refused("remove the adapter first, then another one may have its name", "load_inplace"),
        "unload": _ignored("lora_int_id"),
    },
}
