//! The bounds under which the tests parse requests.

use tollgate_openai::RequestLimits;

/// The defaults of the gateway's config.
pub(crate) const LIMITS: RequestLimits = RequestLimits {
    choices: 8,
    best_of: 2,
    prompts: 16,
    messages: 2_048,
    stop: 16,
    stop_bytes: 256,
    logit_bias: 300,
    top_logprobs: 20,
};
