//! Rotary position embedding: the frequencies by which a model rotates its heads.

use serde::Deserialize;

use super::checker::Checker;
use super::error::ModelError;

/// The parameters that turn positions into angles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// The scaling of frequencies for long contexts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// The frequencies are not scaled.
    None,
    /// Every frequency divided by one factor.
    Linear {
        /// Divisor of the frequencies, at least 1.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by the factor, high frequencies are kept,
    /// with a ramp between them.
    Llama3 {
        /// Divisor of the low frequencies, at least 1.
        factor: f64,
        /// Wavelengths above `original_context / low` are scaled fully.
        low: f64,
        /// Wavelengths below `original_context / high` are not scaled.
        high: f64,
        /// Context length of the unscaled frequencies, tokens.
        original_context: f64,
    },
}

impl Rope {
    /// Returns the radians by which each pair of a head turns from one position to the
    /// next: `head_dim / 2` numbers.
    pub fn frequencies(&self, head_dim: u32) -> Vec<f64> {
        (0..head_dim / 2)
            .map(|pair| self.theta.powf(-f64::from(2 * pair) / f64::from(head_dim)))
            .map(|frequency| self.scaling.apply(frequency))
            .collect()
    }
}

impl RopeScaling {
    fn apply(self, frequency: f64) -> f64 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low, high, original_context } => {
                let turns = original_context * frequency / std::f64::consts::TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                frequency * kept + frequency / factor * (1.0 - kept)
            }
        }
    }
}

/// `rope_scaling`, or `rope_parameters` as transformers 5 writes it.
#[derive(Deserialize)]
pub(super) struct RawRope {
    rope_type: Option<String>,
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    partial_rotary_factor: Option<f64>,
}

pub(super) fn resolve(
    checker: &Checker<'_>,
    theta: Option<f64>,
    old: Option<RawRope>,
    new: Option<RawRope>,
) -> Result<Rope, ModelError> {
    // If a file has both spellings, tools read the new one.
    let (field, raw) = match (new, old) {
        (Some(new), _) => ("rope_parameters", Some(new)),
        (None, old) => ("rope_scaling", old),
    };
    // transformers 5 writes rope_theta inside of rope_parameters.
    let theta = raw.as_ref().and_then(|raw| raw.rope_theta).or(theta).unwrap_or(10_000.0);
    if !(theta.is_finite() && theta > 1.0) {
        return Err(checker.field("rope_theta", format!("{theta} is not a number above 1")));
    }
    let scaling = match raw {
        Some(raw) => scaling(checker, field, &raw)?,
        None => RopeScaling::None,
    };
    Ok(Rope { theta, scaling })
}

fn scaling(
    checker: &Checker<'_>,
    field: &'static str,
    raw: &RawRope,
) -> Result<RopeScaling, ModelError> {
    let number = |name: &str, value: Option<f64>, least: f64| match value {
        Some(value) if value.is_finite() && value >= least => Ok(value),
        Some(value) => Err(checker.field(field, format!("has {name} {value}, below {least}"))),
        None => Err(checker.field(field, format!("lacks {name}"))),
    };
    if raw.partial_rotary_factor.is_some_and(|factor| factor != 1.0) {
        let reason = "has a partial_rotary_factor that is not 1: it is not supported";
        return Err(checker.field(field, reason.to_owned()));
    }
    match raw.rope_type.as_deref().or(raw.old_type.as_deref()) {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: number("factor", raw.factor, 1.0)? }),
        Some("llama3") => {
            let low = number("low_freq_factor", raw.low_freq_factor, 0.0)?;
            let high = number("high_freq_factor", raw.high_freq_factor, 0.0)?;
            if high <= low {
                let reason = format!("has high_freq_factor {high} not above low_freq_factor {low}");
                return Err(checker.field(field, reason));
            }
            let original = raw.original_max_position_embeddings;
            Ok(RopeScaling::Llama3 {
                factor: number("factor", raw.factor, 1.0)?,
                low,
                high,
                original_context: number("original_max_position_embeddings", original, 1.0)?,
            })
        }
        Some(other) => {
            let reason =
                format!("has type {other:?}: only default, linear and llama3 are supported");
            Err(checker.field(field, reason))
        }
    }
}
