//! Checks of a worker's announcement. After them the worker's models are facts.

use std::collections::BTreeMap;
use std::sync::Arc;

use tollgate_domain::{
    CostTable, DeviceClass, ModelName, REPETITION_PENALTIES, SamplingDefaults, WorkerEpoch,
};
use tollgate_wire::v1;
use tollgate_wire::v1::worker_client::WorkerClient;
use tonic::transport::Channel;

use super::WorkerEndpoint;
use super::assets::{self, Assets};
use crate::model::ServedModel;
use crate::worker_identity::{Trust, WorkerError, WorkerIdentity};

/// Models of one worker.
const MOST_MODELS: usize = 64;
/// The longest context that is accepted, tokens.
const MOST_CONTEXT: u32 = 1 << 24;
/// The largest cost table, bytes.
const MOST_TABLE_BYTES: usize = 1024 * 1024;
/// Characters of a device's name that are kept.
const MOST_DEVICE_NAME: usize = 128;

/// Checks `announcement` and fetches the files that it names.
pub(super) async fn learn(
    endpoint: &WorkerEndpoint,
    announcement: v1::Announcement,
    client: &WorkerClient<Channel>,
    (assets, trust, is_shared): (&Assets, &Trust, bool),
) -> Result<WorkerIdentity, WorkerError> {
    let v1::Announcement { worker, epoch, engine_version: _, device, models } = announcement;
    // Usage is posted under the name, so a worker cannot choose it.
    if worker != endpoint.name.as_str() {
        return Err(WorkerError::InvalidReport("it announces another worker's name"));
    }
    let epoch = WorkerEpoch::try_from(epoch)
        .map_err(|_| WorkerError::InvalidReport("its epoch is not 32 hex digits"))?;
    let device = device.ok_or(WorkerError::InvalidReport("it has no device"))?;
    let class = DeviceClass::new(&device.class)
        .map_err(|_| WorkerError::InvalidReport("its device has no class"))?;
    // The name is printed on terminals, so it must not carry control characters.
    let name = device.name.chars().filter(|c| !c.is_control());
    let name: String = name.take(MOST_DEVICE_NAME).collect();
    let device = match device.threads {
        0 => name,
        threads => format!("{class}, {threads} threads, {name}"),
    };
    if models.is_empty() || models.len() > MOST_MODELS {
        return Err(WorkerError::InvalidReport("it serves no model, or too many"));
    }
    let mut served = BTreeMap::new();
    for model in models {
        let model = learn_model(model, &class, client, assets).await?;
        if served.insert(model.name.clone(), Arc::new(model)).is_some() {
            return Err(WorkerError::InvalidReport("it announces a model twice"));
        }
    }
    let (name, trust) = (endpoint.name.clone(), trust.clone());
    Ok(WorkerIdentity { name, epoch, class, device, is_shared, models: served, trust })
}

async fn learn_model(
    model: v1::Model,
    class: &DeviceClass,
    client: &WorkerClient<Channel>,
    assets: &Assets,
) -> Result<ServedModel, WorkerError> {
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
    let name = ModelName::new(&name)
        .map_err(|_| WorkerError::InvalidReport("a model has no valid name"))?;
    // One token of prompt and one of answer are the least that a request needs.
    if !(2..=MOST_CONTEXT).contains(&context_length) || vocabulary == 0 {
        return Err(WorkerError::InvalidReport("a model has no context or no vocabulary"));
    }
    // The hash is part of responses, so its form is bounded.
    if hash.len() > 128 || !hash.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(WorkerError::InvalidReport("a model's hash is not hex"));
    }
    if cost_table_json.len() > MOST_TABLE_BYTES {
        return Err(WorkerError::InvalidReport("a cost table is larger than 1 MiB"));
    }
    let table: CostTable =
        serde_json::from_str(&cost_table_json).map_err(WorkerError::CostTable)?;
    let text = assets.tokenizer(client, &tokenizer_asset).await?;
    // A token without a row of logits could not be scored.
    if text.tokenizer.vocabulary_size() > vocabulary as usize {
        return Err(WorkerError::InvalidReport(
            "a tokenizer has more tokens than the model has rows",
        ));
    }
    let template = assets::template(client, &template_asset, template_context_json).await?;
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
fn check_defaults(announced: v1::SamplingDefaults) -> Result<SamplingDefaults, WorkerError> {
    let v1::SamplingDefaults { temperature, top_k, top_p, min_p, repetition_penalty } = announced;
    let openai = SamplingDefaults::default();
    let defaults = SamplingDefaults {
        temperature: temperature.unwrap_or(openai.temperature),
        top_k: top_k.unwrap_or(openai.top_k),
        top_p: top_p.unwrap_or(openai.top_p),
        min_p: min_p.unwrap_or(openai.min_p),
        repetition_penalty: repetition_penalty.unwrap_or(openai.repetition_penalty),
    };
    let (low, high) = (*REPETITION_PENALTIES.start() as f32, *REPETITION_PENALTIES.end() as f32);
    let are_in_range = (0.0..=2.0).contains(&defaults.temperature)
        && (0.0..=1.0).contains(&defaults.top_p)
        && (0.0..=1.0).contains(&defaults.min_p)
        && (low..=high).contains(&defaults.repetition_penalty);
    match are_in_range {
        true => Ok(defaults),
        false => Err(WorkerError::InvalidReport("a model's sampling defaults are out of range")),
    }
}
