//! What a worker announces, checked: from here on its models are facts.

use std::collections::BTreeMap;
use std::sync::Arc;

use tollgate_domain::{
    CostTable, DeviceClass, ModelName, REPETITION_PENALTIES, SamplingDefaults, WorkerEpoch,
};
use tollgate_wire::v1;
use tollgate_wire::v1::worker_client::WorkerClient;
use tonic::transport::Channel;

use super::assets::{self, Assets};
use super::{ServedModel, UpstreamError, WorkerEndpoint};

/// Models of one worker.
const MOST_MODELS: usize = 64;
/// The longest context that is believed, tokens.
const MOST_CONTEXT: u32 = 1 << 24;
/// The largest cost table, bytes.
const MOST_TABLE_BYTES: usize = 1024 * 1024;

/// An announcement that holds.
pub(super) struct Announced {
    pub(super) epoch: WorkerEpoch,
    pub(super) class: DeviceClass,
    /// The device's name, for people.
    pub(super) device: String,
    pub(super) models: BTreeMap<ModelName, Arc<ServedModel>>,
}

/// Checks `announcement` and fetches what it names.
pub(super) async fn learn(
    endpoint: &WorkerEndpoint,
    announcement: v1::Announcement,
    client: &WorkerClient<Channel>,
    assets: &Assets,
) -> Result<Announced, UpstreamError> {
    let v1::Announcement { worker, epoch, engine_version: _, device, models } = announcement;
    if worker != endpoint.name.as_str() {
        return Err(UpstreamError::Lied("it announces another worker's name"));
    }
    let epoch = WorkerEpoch::try_from(epoch)
        .map_err(|_| UpstreamError::Lied("its epoch is not 32 hex digits"))?;
    let device = device.ok_or(UpstreamError::Lied("it has no device"))?;
    let class = DeviceClass::new(&device.class)
        .map_err(|_| UpstreamError::Lied("its device has no class"))?;
    // It ends up on a terminal: printable and short, whatever it says.
    let name: String = device.name.chars().filter(|c| !c.is_control()).take(128).collect();
    let device = match device.threads {
        0 => name,
        threads => format!("{class}, {threads} threads, {name}"),
    };
    if models.is_empty() || models.len() > MOST_MODELS {
        return Err(UpstreamError::Lied("it serves no model, or too many"));
    }
    let mut served = BTreeMap::new();
    for model in models {
        let model = learn_model(model, &class, client, assets).await?;
        if served.insert(model.name.clone(), Arc::new(model)).is_some() {
            return Err(UpstreamError::Lied("it announces a model twice"));
        }
    }
    Ok(Announced { epoch, class, device, models: served })
}

async fn learn_model(
    model: v1::Model,
    class: &DeviceClass,
    client: &WorkerClient<Channel>,
    assets: &Assets,
) -> Result<ServedModel, UpstreamError> {
    let v1::Model {
        name,
        hash,
        tokenizer_asset,
        template_asset,
        context_length,
        vocabulary,
        end_tokens: _, // the worker ends choices; the gateway only counts
        cost_table_json,
        template_context_json,
        sampling_defaults,
    } = model;
    let name =
        ModelName::new(&name).map_err(|_| UpstreamError::Lied("a model has no good name"))?;
    if !(2..=MOST_CONTEXT).contains(&context_length) || vocabulary == 0 {
        return Err(UpstreamError::Lied("a model has no context or no vocabulary"));
    }
    if hash.len() > 128 || !hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(UpstreamError::Lied("a model's hash is not hex"));
    }
    if cost_table_json.len() > MOST_TABLE_BYTES {
        return Err(UpstreamError::Lied("a cost table is larger than 1 MiB"));
    }
    let table: CostTable =
        serde_json::from_str(&cost_table_json).map_err(UpstreamError::CostTable)?;
    let text = assets.tokenizer(client, &tokenizer_asset).await?;
    if text.tokenizer.vocabulary_size() > vocabulary as usize {
        return Err(UpstreamError::Lied("a tokenizer has more tokens than the model has rows"));
    }
    let template = assets::template(client, &template_asset, &template_context_json).await?;
    let class = class.clone();
    let defaults = check_defaults(sampling_defaults.unwrap_or_default())?;
    Ok(ServedModel {
        name,
        hash,
        class,
        text,
        template,
        context_length,
        vocabulary,
        table,
        defaults,
    })
}

/// Checks a model's sampling defaults: the worker would refuse every request that
/// names no parameters of its own if one were out of range.
fn check_defaults(announced: v1::SamplingDefaults) -> Result<SamplingDefaults, UpstreamError> {
    let v1::SamplingDefaults { temperature, top_k, top_p, repetition_penalty } = announced;
    let openai = SamplingDefaults::default();
    let defaults = SamplingDefaults {
        temperature: temperature.unwrap_or(openai.temperature),
        top_k: top_k.unwrap_or(openai.top_k),
        top_p: top_p.unwrap_or(openai.top_p),
        repetition_penalty: repetition_penalty.unwrap_or(openai.repetition_penalty),
    };
    let (low, high) = (*REPETITION_PENALTIES.start() as f32, *REPETITION_PENALTIES.end() as f32);
    let are_in_range = (0.0..=2.0).contains(&defaults.temperature)
        && (0.0..=1.0).contains(&defaults.top_p)
        && (low..=high).contains(&defaults.repetition_penalty);
    match are_in_range {
        true => Ok(defaults),
        false => Err(UpstreamError::Lied("a model's sampling defaults are out of range")),
    }
}
