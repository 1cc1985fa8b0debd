#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GenerateRequest {
    #[prost(string, optional, tag="1")]
    pub request_id: ::core::option::Option<::prost::alloc::string::String>,
    #[prost(message, optional, tag="5")]
    pub sampling: ::core::option::Option<SamplingParams>,
    #[prost(uint32, optional, tag="6")]
    pub max_new_tokens: ::core::option::Option<u32>,
    #[prost(string, repeated, tag="7")]
    pub stop: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(uint32, repeated, tag="8")]
    pub stop_token_ids: ::prost::alloc::vec::Vec<u32>,
    #[prost(bool, tag="9")]
    pub ignore_eos: bool,
    #[prost(bool, tag="10")]
    pub include_stop_in_output: bool,
    #[prost(bool, tag="11")]
    pub parse_control_tokens: bool,
    #[prost(bool, tag="12")]
    pub omit_text: bool,
    #[prost(uint32, optional, tag="13")]
    pub min_new_tokens: ::core::option::Option<u32>,
    #[prost(uint32, optional, tag="14")]
    pub logprobs: ::core::option::Option<u32>,
    #[prost(uint32, optional, tag="15")]
    pub prompt_logprobs: ::core::option::Option<u32>,
    #[prost(uint32, optional, tag="21")]
    pub n: ::core::option::Option<u32>,
    #[prost(string, optional, tag="22")]
    pub cache_salt: ::core::option::Option<::prost::alloc::string::String>,
    #[prost(bool, tag="23")]
    pub parse_output: bool,
    #[prost(uint32, optional, tag="24")]
    pub attach_window_ms: ::core::option::Option<u32>,
    #[prost(oneof="generate_request::Input", tags="2, 3, 4")]
    pub input: ::core::option::Option<generate_request::Input>,
    #[prost(oneof="generate_request::Constraint", tags="16, 17, 18, 19, 20")]
    pub constraint: ::core::option::Option<generate_request::Constraint>,
}
/// Nested message and enum types in `GenerateRequest`.
pub mod generate_request {
    #[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Oneof)]
    pub enum Input {
        #[prost(string, tag="2")]
        Text(::prost::alloc::string::String),
        #[prost(message, tag="3")]
        TokenIds(super::TokenIds),
        #[prost(message, tag="4")]
        Chat(super::Chat),
    }
    #[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Oneof)]
    pub enum Constraint {
        #[prost(string, tag="16")]
        JsonSchema(::prost::alloc::string::String),
        #[prost(message, tag="17")]
        JsonObject(super::JsonObject),
        #[prost(string, tag="18")]
        Regex(::prost::alloc::string::String),
        #[prost(string, tag="19")]
        Grammar(::prost::alloc::string::String),
        #[prost(message, tag="20")]
        Choice(super::Choice),
    }
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct AttachRequest {
    #[prost(string, tag="1")]
    pub request_id: ::prost::alloc::string::String,
    #[prost(uint32, tag="2")]
    pub next_token_index: u32,
    #[prost(uint32, repeated, tag="3")]
    pub other_next_token_indices: ::prost::alloc::vec::Vec<u32>,
    #[prost(uint32, tag="4")]
    pub next_prompt_token_index: u32,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ReplayRequest {
    #[prost(string, tag="1")]
    pub request_id: ::prost::alloc::string::String,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ReplayResponse {
    #[prost(oneof="replay_response::Event", tags="1, 2")]
    pub event: ::core::option::Option<replay_response::Event>,
}
/// Nested message and enum types in `ReplayResponse`.
pub mod replay_response {
    #[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Oneof)]
    pub enum Event {
        #[prost(message, tag="1")]
        Record(super::RequestRecord),
        #[prost(message, tag="2")]
        Response(super::GenerateResponse),
    }
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct RequestRecord {
    #[prost(string, tag="1")]
    pub request_id: ::prost::alloc::string::String,
    #[prost(message, optional, tag="2")]
    pub request: ::core::option::Option<GenerateRequest>,
    #[prost(uint32, repeated, tag="3")]
    pub prompt_token_ids: ::prost::alloc::vec::Vec<u32>,
    #[prost(uint64, tag="4")]
    pub seed: u64,
    #[prost(message, optional, tag="5")]
    pub setup: ::core::option::Option<Setup>,
    #[prost(message, repeated, tag="6")]
    pub answers: ::prost::alloc::vec::Vec<RecordedAnswer>,
    #[prost(uint64, tag="7")]
    pub accepted_unix_ns: u64,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct RecordedAnswer {
    #[prost(uint32, repeated, tag="1")]
    pub token_ids: ::prost::alloc::vec::Vec<u32>,
    #[prost(enumeration="FinishReason", tag="2")]
    pub finish_reason: i32,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Setup {
    #[prost(string, tag="1")]
    pub fingerprint: ::prost::alloc::string::String,
    #[prost(string, tag="2")]
    pub version: ::prost::alloc::string::String,
    #[prost(string, tag="3")]
    pub build: ::prost::alloc::string::String,
    #[prost(string, tag="4")]
    pub weight_dtype: ::prost::alloc::string::String,
    #[prost(string, tag="5")]
    pub kv_dtype: ::prost::alloc::string::String,
    #[prost(string, tag="6")]
    pub device_name: ::prost::alloc::string::String,
    #[prost(uint32, tag="7")]
    pub world_size: u32,
    #[prost(string, tag="8")]
    pub front: ::prost::alloc::string::String,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct JsonObject {
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Choice {
    #[prost(string, repeated, tag="1")]
    pub texts: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct TokenIds {
    #[prost(uint32, repeated, tag="1")]
    pub ids: ::prost::alloc::vec::Vec<u32>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Chat {
    #[prost(message, repeated, tag="1")]
    pub messages: ::prost::alloc::vec::Vec<ChatMessage>,
    #[prost(bool, tag="2")]
    pub omit_generation_prompt: bool,
    #[prost(string, tag="3")]
    pub template_kwargs_json: ::prost::alloc::string::String,
    #[prost(message, repeated, tag="4")]
    pub tools: ::prost::alloc::vec::Vec<Tool>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Tool {
    #[prost(string, tag="1")]
    pub name: ::prost::alloc::string::String,
    #[prost(string, optional, tag="2")]
    pub description: ::core::option::Option<::prost::alloc::string::String>,
    #[prost(string, tag="3")]
    pub parameters_json: ::prost::alloc::string::String,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ChatMessage {
    #[prost(string, tag="1")]
    pub role: ::prost::alloc::string::String,
    #[prost(string, optional, tag="2")]
    pub content: ::core::option::Option<::prost::alloc::string::String>,
    #[prost(message, repeated, tag="3")]
    pub tool_calls: ::prost::alloc::vec::Vec<ToolCall>,
    #[prost(string, optional, tag="4")]
    pub tool_call_id: ::core::option::Option<::prost::alloc::string::String>,
    #[prost(string, optional, tag="5")]
    pub name: ::core::option::Option<::prost::alloc::string::String>,
    #[prost(string, optional, tag="6")]
    pub reasoning_content: ::core::option::Option<::prost::alloc::string::String>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ToolCall {
    #[prost(string, tag="1")]
    pub id: ::prost::alloc::string::String,
    #[prost(string, tag="2")]
    pub name: ::prost::alloc::string::String,
    #[prost(string, tag="3")]
    pub arguments_json: ::prost::alloc::string::String,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct SamplingParams {
    #[prost(float, optional, tag="1")]
    pub temperature: ::core::option::Option<f32>,
    #[prost(float, optional, tag="2")]
    pub top_p: ::core::option::Option<f32>,
    #[prost(int32, optional, tag="3")]
    pub top_k: ::core::option::Option<i32>,
    #[prost(float, optional, tag="4")]
    pub min_p: ::core::option::Option<f32>,
    #[prost(uint64, optional, tag="5")]
    pub seed: ::core::option::Option<u64>,
    #[prost(float, optional, tag="6")]
    pub frequency_penalty: ::core::option::Option<f32>,
    #[prost(float, optional, tag="7")]
    pub presence_penalty: ::core::option::Option<f32>,
    #[prost(float, optional, tag="8")]
    pub repetition_penalty: ::core::option::Option<f32>,
    #[prost(map="uint32, float", tag="9")]
    pub logit_bias: ::std::collections::HashMap<u32, f32>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GenerateResponse {
    #[prost(string, tag="1")]
    pub request_id: ::prost::alloc::string::String,
    #[prost(oneof="generate_response::Event", tags="2, 3, 4, 5")]
    pub event: ::core::option::Option<generate_response::Event>,
}
/// Nested message and enum types in `GenerateResponse`.
pub mod generate_response {
    #[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Oneof)]
    pub enum Event {
        #[prost(message, tag="2")]
        Accepted(super::Accepted),
        #[prost(message, tag="3")]
        Delta(super::Delta),
        #[prost(message, tag="4")]
        Finished(super::Finished),
        #[prost(message, tag="5")]
        PromptLogprobs(super::PromptLogprobs),
    }
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Accepted {
    #[prost(uint32, tag="1")]
    pub prompt_tokens: u32,
    #[prost(uint64, tag="2")]
    pub seed: u64,
    #[prost(uint32, tag="3")]
    pub queue_position: u32,
    #[prost(bool, tag="4")]
    pub is_journaled: bool,
    #[prost(uint32, tag="5")]
    pub num_choices: u32,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Delta {
    #[prost(uint32, tag="1")]
    pub index: u32,
    #[prost(uint32, tag="2")]
    pub first_token_index: u32,
    #[prost(uint32, repeated, tag="3")]
    pub token_ids: ::prost::alloc::vec::Vec<u32>,
    #[prost(string, tag="4")]
    pub text: ::prost::alloc::string::String,
    #[prost(message, repeated, tag="5")]
    pub logprobs: ::prost::alloc::vec::Vec<TokenLogprobs>,
    #[prost(string, tag="6")]
    pub reasoning_text: ::prost::alloc::string::String,
    #[prost(message, repeated, tag="7")]
    pub tool_calls: ::prost::alloc::vec::Vec<ToolCallDelta>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ToolCallDelta {
    #[prost(uint32, tag="1")]
    pub index: u32,
    #[prost(string, tag="2")]
    pub id: ::prost::alloc::string::String,
    #[prost(string, tag="3")]
    pub name: ::prost::alloc::string::String,
    #[prost(string, tag="4")]
    pub arguments_json: ::prost::alloc::string::String,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PromptLogprobs {
    #[prost(uint32, tag="1")]
    pub first_token_index: u32,
    #[prost(message, repeated, tag="2")]
    pub logprobs: ::prost::alloc::vec::Vec<TokenLogprobs>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct TokenLogprobs {
    #[prost(message, optional, tag="1")]
    pub token: ::core::option::Option<TokenLogprob>,
    #[prost(message, repeated, tag="2")]
    pub best: ::prost::alloc::vec::Vec<TokenLogprob>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct TokenLogprob {
    #[prost(uint32, tag="1")]
    pub token_id: u32,
    #[prost(float, tag="2")]
    pub logprob: f32,
    #[prost(uint32, tag="3")]
    pub rank: u32,
    #[prost(bytes="vec", tag="4")]
    pub text: ::prost::alloc::vec::Vec<u8>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Finished {
    #[prost(uint32, tag="1")]
    pub index: u32,
    #[prost(enumeration="FinishReason", tag="2")]
    pub finish_reason: i32,
    #[prost(message, optional, tag="5")]
    pub usage: ::core::option::Option<Usage>,
    #[prost(message, optional, tag="6")]
    pub timings: ::core::option::Option<Timings>,
    #[prost(oneof="finished::MatchedStop", tags="3, 4")]
    pub matched_stop: ::core::option::Option<finished::MatchedStop>,
}
/// Nested message and enum types in `Finished`.
pub mod finished {
    #[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Oneof)]
    pub enum MatchedStop {
        #[prost(uint32, tag="3")]
        MatchedTokenId(u32),
        #[prost(string, tag="4")]
        MatchedStopString(::prost::alloc::string::String),
    }
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Usage {
    #[prost(uint32, tag="1")]
    pub prompt_tokens: u32,
    #[prost(uint32, tag="2")]
    pub completion_tokens: u32,
    #[prost(uint32, tag="3")]
    pub cached_tokens: u32,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Timings {
    #[prost(uint64, tag="1")]
    pub queue_ns: u64,
    #[prost(uint64, tag="2")]
    pub prefill_ns: u64,
    #[prost(uint64, tag="3")]
    pub decode_ns: u64,
    #[prost(uint64, tag="4")]
    pub time_to_first_token_ns: u64,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct CompleteResponse {
    #[prost(message, optional, tag="1")]
    pub accepted: ::core::option::Option<Accepted>,
    #[prost(string, tag="2")]
    pub request_id: ::prost::alloc::string::String,
    #[prost(message, repeated, tag="3")]
    pub choices: ::prost::alloc::vec::Vec<CompleteChoice>,
    #[prost(message, repeated, tag="4")]
    pub prompt_logprobs: ::prost::alloc::vec::Vec<TokenLogprobs>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct CompleteChoice {
    #[prost(uint32, tag="1")]
    pub index: u32,
    #[prost(uint32, repeated, tag="2")]
    pub token_ids: ::prost::alloc::vec::Vec<u32>,
    #[prost(string, tag="3")]
    pub text: ::prost::alloc::string::String,
    #[prost(string, tag="4")]
    pub reasoning_text: ::prost::alloc::string::String,
    #[prost(message, repeated, tag="5")]
    pub tool_calls: ::prost::alloc::vec::Vec<ToolCall>,
    #[prost(message, repeated, tag="6")]
    pub logprobs: ::prost::alloc::vec::Vec<TokenLogprobs>,
    #[prost(message, optional, tag="7")]
    pub finished: ::core::option::Option<Finished>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct CancelRequest {
    #[prost(string, tag="1")]
    pub request_id: ::prost::alloc::string::String,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct CancelResponse {
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct TokenizeRequest {
    #[prost(string, tag="1")]
    pub text: ::prost::alloc::string::String,
    #[prost(bool, tag="2")]
    pub parse_control_tokens: bool,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct TokenizeResponse {
    #[prost(uint32, repeated, tag="1")]
    pub token_ids: ::prost::alloc::vec::Vec<u32>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct DetokenizeRequest {
    #[prost(uint32, repeated, tag="1")]
    pub token_ids: ::prost::alloc::vec::Vec<u32>,
    #[prost(bool, tag="2")]
    pub keep_control_tokens: bool,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct DetokenizeResponse {
    #[prost(string, tag="1")]
    pub text: ::prost::alloc::string::String,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct RenderChatRequest {
    #[prost(message, optional, tag="1")]
    pub chat: ::core::option::Option<Chat>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct RenderChatResponse {
    #[prost(string, tag="1")]
    pub text: ::prost::alloc::string::String,
    #[prost(uint32, repeated, tag="2")]
    pub token_ids: ::prost::alloc::vec::Vec<u32>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GetModelInfoRequest {
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GetModelInfoResponse {
    #[prost(string, tag="1")]
    pub name: ::prost::alloc::string::String,
    #[prost(string, tag="2")]
    pub model_type: ::prost::alloc::string::String,
    #[prost(string, repeated, tag="3")]
    pub architectures: ::prost::alloc::vec::Vec<::prost::alloc::string::String>,
    #[prost(uint32, tag="4")]
    pub vocab_size: u32,
    #[prost(uint32, tag="5")]
    pub max_seq_len: u32,
    #[prost(uint32, tag="6")]
    pub max_prompt_tokens: u32,
    #[prost(uint32, repeated, tag="7")]
    pub end_token_ids: ::prost::alloc::vec::Vec<u32>,
    #[prost(uint32, optional, tag="8")]
    pub bos_token_id: ::core::option::Option<u32>,
    #[prost(bool, tag="9")]
    pub has_chat_template: bool,
    #[prost(message, optional, tag="10")]
    pub default_sampling: ::core::option::Option<SamplingParams>,
    #[prost(string, tag="11")]
    pub fingerprint: ::prost::alloc::string::String,
    #[prost(string, tag="12")]
    pub output_format: ::prost::alloc::string::String,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GetServerInfoRequest {
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GetServerInfoResponse {
    #[prost(string, tag="1")]
    pub version: ::prost::alloc::string::String,
    #[prost(uint32, tag="2")]
    pub num_slots: u32,
    #[prost(uint32, tag="3")]
    pub max_seq_len: u32,
    #[prost(uint32, tag="4")]
    pub max_queue_len: u32,
    #[prost(uint32, tag="5")]
    pub max_step_tokens: u32,
    #[prost(bool, tag="6")]
    pub supports_batch: bool,
    #[prost(uint64, tag="7")]
    pub epoch: u64,
    #[prost(message, repeated, tag="8")]
    pub workers: ::prost::alloc::vec::Vec<WorkerInfo>,
    #[prost(uint64, tag="9")]
    pub uptime_ns: u64,
    #[prost(uint32, tag="10")]
    pub max_running: u32,
    #[prost(string, tag="11")]
    pub prefix_reuse: ::prost::alloc::string::String,
    #[prost(message, optional, tag="12")]
    pub setup: ::core::option::Option<Setup>,
    #[prost(uint64, tag="13")]
    pub retention_ms: u64,
    #[prost(uint32, tag="14")]
    pub max_attach_window_ms: u32,
    #[prost(enumeration="JournalState", tag="15")]
    pub journal: i32,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct WorkerInfo {
    #[prost(uint32, tag="1")]
    pub rank: u32,
    #[prost(string, tag="2")]
    pub address: ::prost::alloc::string::String,
    #[prost(string, tag="3")]
    pub device: ::prost::alloc::string::String,
    #[prost(string, tag="4")]
    pub weight_dtype: ::prost::alloc::string::String,
    #[prost(string, tag="5")]
    pub kv_dtype: ::prost::alloc::string::String,
    #[prost(uint64, tag="6")]
    pub predicted_memory_bytes: u64,
    #[prost(uint64, tag="7")]
    pub measured_memory_bytes: u64,
    #[prost(message, repeated, tag="8")]
    pub self_tests: ::prost::alloc::vec::Vec<SelfTest>,
    #[prost(uint32, tag="9")]
    pub num_threads: u32,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct SelfTest {
    #[prost(string, tag="1")]
    pub name: ::prost::alloc::string::String,
    #[prost(bool, tag="2")]
    pub passed: bool,
    #[prost(string, tag="3")]
    pub detail: ::prost::alloc::string::String,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GetLoadRequest {
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GetLoadResponse {
    #[prost(uint32, tag="1")]
    pub num_running: u32,
    #[prost(uint32, tag="2")]
    pub num_waiting: u32,
    #[prost(uint32, tag="3")]
    pub num_slots: u32,
    #[prost(uint64, tag="4")]
    pub num_used_tokens: u64,
    #[prost(uint64, tag="5")]
    pub max_total_tokens: u64,
    #[prost(uint64, tag="6")]
    pub num_pending_prefill_tokens: u64,
    #[prost(message, optional, tag="7")]
    pub requests: ::core::option::Option<RequestCounters>,
    #[prost(uint64, tag="8")]
    pub num_prompt_tokens: u64,
    #[prost(uint64, tag="9")]
    pub num_generated_tokens: u64,
    #[prost(uint64, tag="10")]
    pub engine_silence_ns: u64,
    #[prost(uint64, tag="11")]
    pub num_steps: u64,
    #[prost(uint64, tag="12")]
    pub prefill_step_ns: u64,
    #[prost(uint64, tag="13")]
    pub decode_step_ns: u64,
    #[prost(uint32, tag="14")]
    pub max_running: u32,
    #[prost(message, optional, tag="15")]
    pub prefix_cache: ::core::option::Option<PrefixCacheCounters>,
    #[prost(uint32, tag="16")]
    pub num_unread: u32,
    #[prost(uint64, tag="17")]
    pub num_recoveries: u64,
    #[prost(uint64, tag="18")]
    pub num_resumed: u64,
    #[prost(enumeration="ServerState", tag="19")]
    pub state: i32,
    #[prost(uint64, tag="20")]
    pub epoch: u64,
    #[prost(message, repeated, tag="21")]
    pub ranks: ::prost::alloc::vec::Vec<RankLoad>,
    #[prost(message, optional, tag="22")]
    pub latencies: ::core::option::Option<Latencies>,
    #[prost(uint64, tag="23")]
    pub oldest_waiting_ns: u64,
    #[prost(uint64, tag="24")]
    pub uptime_ns: u64,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct RankLoad {
    #[prost(uint32, tag="1")]
    pub rank: u32,
    #[prost(string, tag="2")]
    pub device: ::prost::alloc::string::String,
    #[prost(bool, tag="3")]
    pub is_up: bool,
    #[prost(uint64, tag="4")]
    pub memory_bytes: u64,
    #[prost(uint64, tag="5")]
    pub device_memory_bytes: u64,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Latencies {
    #[prost(message, optional, tag="1")]
    pub time_to_first_token: ::core::option::Option<Histogram>,
    #[prost(message, optional, tag="2")]
    pub inter_token_latency: ::core::option::Option<Histogram>,
    #[prost(message, optional, tag="3")]
    pub time_per_output_token: ::core::option::Option<Histogram>,
    #[prost(message, optional, tag="4")]
    pub e2e_request_latency: ::core::option::Option<Histogram>,
    #[prost(message, optional, tag="5")]
    pub request_queue_time: ::core::option::Option<Histogram>,
    #[prost(message, optional, tag="6")]
    pub request_prefill_time: ::core::option::Option<Histogram>,
    #[prost(message, optional, tag="7")]
    pub request_decode_time: ::core::option::Option<Histogram>,
    #[prost(message, optional, tag="8")]
    pub request_inference_time: ::core::option::Option<Histogram>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Histogram {
    #[prost(double, repeated, tag="1")]
    pub upper_bounds_s: ::prost::alloc::vec::Vec<f64>,
    #[prost(uint64, repeated, tag="2")]
    pub counts: ::prost::alloc::vec::Vec<u64>,
    #[prost(double, tag="3")]
    pub sum_s: f64,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GetMetricsRequest {
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct GetMetricsResponse {
    #[prost(bytes="vec", tag="1")]
    pub text: ::prost::alloc::vec::Vec<u8>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct PrefixCacheCounters {
    #[prost(uint64, tag="1")]
    pub num_queried_tokens: u64,
    #[prost(uint64, tag="2")]
    pub num_hit_tokens: u64,
    #[prost(uint64, tag="3")]
    pub num_hits: u64,
    #[prost(uint64, tag="4")]
    pub num_copies: u64,
    #[prost(uint64, tag="5")]
    pub num_copied_tokens: u64,
    #[prost(uint64, tag="6")]
    pub num_evictions: u64,
    #[prost(uint64, tag="7")]
    pub num_evicted_tokens: u64,
    #[prost(uint64, tag="8")]
    pub num_cached_tokens: u64,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct RequestCounters {
    #[prost(uint64, tag="1")]
    pub accepted: u64,
    #[prost(uint64, tag="2")]
    pub stop: u64,
    #[prost(uint64, tag="3")]
    pub length: u64,
    #[prost(uint64, tag="4")]
    pub cancelled: u64,
    #[prost(uint64, tag="5")]
    pub deadline: u64,
    #[prost(uint64, tag="6")]
    pub error: u64,
    #[prost(uint64, tag="7")]
    pub rejected_invalid: u64,
    #[prost(uint64, tag="8")]
    pub rejected_full: u64,
    #[prost(uint64, tag="9")]
    pub rejected_unavailable: u64,
    #[prost(uint64, tag="10")]
    pub poisoned: u64,
    #[prost(uint64, tag="11")]
    pub slow_reader: u64,
    #[prost(uint64, tag="12")]
    pub corrupted: u64,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListSlotsRequest {
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct ListSlotsResponse {
    #[prost(message, repeated, tag="1")]
    pub slots: ::prost::alloc::vec::Vec<Slot>,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct Slot {
    #[prost(uint32, tag="1")]
    pub index: u32,
    #[prost(uint64, tag="2")]
    pub generation: u64,
    #[prost(enumeration="SlotState", tag="3")]
    pub state: i32,
    #[prost(string, optional, tag="4")]
    pub request_id: ::core::option::Option<::prost::alloc::string::String>,
    #[prost(uint32, tag="5")]
    pub num_computed_tokens: u32,
    #[prost(uint32, tag="6")]
    pub prompt_tokens: u32,
    #[prost(uint32, tag="7")]
    pub generated_tokens: u32,
    #[prost(uint32, tag="8")]
    pub num_cached_tokens: u32,
    #[prost(uint32, tag="9")]
    pub choice_index: u32,
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct FlushCacheRequest {
}
#[allow(clippy::derive_partial_eq_without_eq)]
#[derive(Clone, PartialEq, ::prost::Message)]
pub struct FlushCacheResponse {
    #[prost(uint64, tag="1")]
    pub num_tokens: u64,
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum FinishReason {
    Unspecified = 0,
    Stop = 1,
    Length = 2,
    Cancelled = 3,
}
impl FinishReason {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            FinishReason::Unspecified => "FINISH_REASON_UNSPECIFIED",
            FinishReason::Stop => "FINISH_REASON_STOP",
            FinishReason::Length => "FINISH_REASON_LENGTH",
            FinishReason::Cancelled => "FINISH_REASON_CANCELLED",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "FINISH_REASON_UNSPECIFIED" => Some(Self::Unspecified),
            "FINISH_REASON_STOP" => Some(Self::Stop),
            "FINISH_REASON_LENGTH" => Some(Self::Length),
            "FINISH_REASON_CANCELLED" => Some(Self::Cancelled),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum JournalState {
    Unspecified = 0,
    Off = 1,
    On = 2,
    Failing = 3,
}
impl JournalState {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            JournalState::Unspecified => "JOURNAL_STATE_UNSPECIFIED",
            JournalState::Off => "JOURNAL_STATE_OFF",
            JournalState::On => "JOURNAL_STATE_ON",
            JournalState::Failing => "JOURNAL_STATE_FAILING",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "JOURNAL_STATE_UNSPECIFIED" => Some(Self::Unspecified),
            "JOURNAL_STATE_OFF" => Some(Self::Off),
            "JOURNAL_STATE_ON" => Some(Self::On),
            "JOURNAL_STATE_FAILING" => Some(Self::Failing),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum ServerState {
    Unspecified = 0,
    Starting = 1,
    Ready = 2,
    Recovering = 3,
    Down = 4,
    Draining = 5,
}
impl ServerState {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            ServerState::Unspecified => "SERVER_STATE_UNSPECIFIED",
            ServerState::Starting => "SERVER_STATE_STARTING",
            ServerState::Ready => "SERVER_STATE_READY",
            ServerState::Recovering => "SERVER_STATE_RECOVERING",
            ServerState::Down => "SERVER_STATE_DOWN",
            ServerState::Draining => "SERVER_STATE_DRAINING",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "SERVER_STATE_UNSPECIFIED" => Some(Self::Unspecified),
            "SERVER_STATE_STARTING" => Some(Self::Starting),
            "SERVER_STATE_READY" => Some(Self::Ready),
            "SERVER_STATE_RECOVERING" => Some(Self::Recovering),
            "SERVER_STATE_DOWN" => Some(Self::Down),
            "SERVER_STATE_DRAINING" => Some(Self::Draining),
            _ => None,
        }
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
#[repr(i32)]
pub enum SlotState {
    Unspecified = 0,
    Free = 1,
    Prefill = 2,
    Decode = 3,
}
impl SlotState {
    /// String value of the enum field names used in the ProtoBuf definition.
    ///
    /// The values are not transformed in any way and thus are considered stable
    /// (if the ProtoBuf definition does not change) and safe for programmatic use.
    pub fn as_str_name(&self) -> &'static str {
        match self {
            SlotState::Unspecified => "SLOT_STATE_UNSPECIFIED",
            SlotState::Free => "SLOT_STATE_FREE",
            SlotState::Prefill => "SLOT_STATE_PREFILL",
            SlotState::Decode => "SLOT_STATE_DECODE",
        }
    }
    /// Creates an enum from field names used in the ProtoBuf definition.
    pub fn from_str_name(value: &str) -> ::core::option::Option<Self> {
        match value {
            "SLOT_STATE_UNSPECIFIED" => Some(Self::Unspecified),
            "SLOT_STATE_FREE" => Some(Self::Free),
            "SLOT_STATE_PREFILL" => Some(Self::Prefill),
            "SLOT_STATE_DECODE" => Some(Self::Decode),
            _ => None,
        }
    }
}
