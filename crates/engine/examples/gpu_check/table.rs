//! Prints measurements as tables, beside a peer's figures and the targets.

use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::Value;

/// Tokens a second on one H200, bf16, 1,024 tokens of context: shape, case, bound
/// computed from 4.3 TB/s and 790 TFLOP/s (bf16), first milestone, target.
const AIMS: [(&str, &str, [f64; 3]); 12] = [
    ("llama-3-8b", "1", [284.0, 200.0, 240.0]),
    ("llama-3-8b", "32", [7_128.0, 4_300.0, 6_000.0]),
    ("llama-3-8b", "128", [17_099.0, 10_000.0, 14_500.0]),
    ("llama-3-8b", "prompt", [54_500.0, 25_000.0, 40_000.0]),
    ("qwen2.5-7b", "1", [303.0, 210.0, 255.0]),
    ("qwen2.5-7b", "32", [8_589.0, 5_100.0, 7_300.0]),
    ("qwen2.5-7b", "128", [25_415.0, 15_000.0, 21_000.0]),
    ("qwen2.5-7b", "prompt", [58_700.0, 27_000.0, 43_000.0]),
    ("qwen2.5-0.5b", "1", [4_298.0, 1_000.0, 2_000.0]),
    ("qwen2.5-0.5b", "32", [98_900.0, 25_000.0, 45_000.0]),
    ("qwen2.5-0.5b", "128", [212_000.0, 60_000.0, 120_000.0]),
    ("qwen2.5-0.5b", "prompt", [983_000.0, 200_000.0, 400_000.0]),
];

/// Returns the tables of all results in a folder that `run` has filled.
pub(crate) fn run(folder: &Path) -> Result<String, Box<dyn Error>> {
    // A file that was truncated while it was written counts as missing.
    let read = |name: &str| -> Option<Value> {
        serde_json::from_str(&fs::read_to_string(folder.join(name)).ok()?).ok()
    };
    let peer = read("peer.json").unwrap_or_default();
    let agreed = read("agree.json").map(|agree| agreed(&agree)).transpose()?;
    let attributed = read("attribution.json").map(|it| attributed(&it)).transpose()?;
    let metered = read("meter.json").map(|meter| metered(&meter)).transpose()?;
    let measured = read("speed.json").map(|speed| measured(&speed, &peer)).transpose()?;
    let tables: Vec<String> =
        [agreed, attributed, metered, measured].into_iter().flatten().collect();
    Ok(tables.join("\n"))
}

/// Returns the table of whole models compared with the CPU.
fn agreed(agree: &Value) -> Result<String, Box<dyn Error>> {
    let mut text = String::from(
        "| model, way | passed | rows | largest difference | bound | draws | graphs | s |\n\
         |---|---|---|---|---|---|---|---|\n",
    );
    for case in agree["cases"].as_array().into_iter().flatten() {
        let title = said(&case["case"]);
        if let Some(why) = case["why"].as_str() {
            writeln!(text, "| {title} | {} | {} | | | | | |", case["passed"], cell(why))?;
            continue;
        }
        let products = if case["vendor_products"] == true { "" } else { ", own products" };
        writeln!(
            text,
            "| {title}{products} | {} | {} | {:.4} | {:.2} | {} | {} | {:.0} |",
            case["passed"],
            case["rows"],
            number(&case["largest_difference"]),
            number(&case["bound"]),
            case["draws"],
            case["graphs"],
            number(&case["seconds"]),
        )?;
    }
    Ok(text)
}

/// Returns the table of attributed shares compared with Shapley values.
fn attributed(attribution: &Value) -> Result<String, Box<dyn Error>> {
    let mut text = String::from(
        "| shape, step | ms | predicted | attributed to another sequence |\n|---|---|---|---|\n",
    );
    for case in attribution["cases"].as_array().into_iter().flatten() {
        let title = said(&case["case"]);
        if let Some(why) = case["why"].as_str() {
            writeln!(text, "| {title} | {} | | |", cell(why))?;
        }
        for mix in case["mixes"].as_array().into_iter().flatten() {
            let [step, predicted] = ["step_ns", "predicted_ns"].map(|it| number(&mix[it]) / 1e6);
            let misplaced = 100.0 * number(&mix["misplaced"]);
            let mix = said(&mix["mix"]);
            writeln!(text, "| {title}, {mix} | {step:.2} | {predicted:.2} | {misplaced:.1} % |")?;
        }
    }
    Ok(text)
}

/// Returns the table of booked time compared with the device's own view.
fn metered(meter: &Value) -> Result<String, Box<dyn Error>> {
    let mut text = String::from(
        "| given work for | metered busy | the card's own tool | passed |\n|---|---|---|---|\n",
    );
    for phase in meter["phases"].as_array().into_iter().flatten() {
        let tool = match phase["why_no_tool"].as_str() {
            Some(why) => format!("not asked: {why}"),
            None => format!("{:.3}", number(&phase["tool"])),
        };
        let (duty, metered) = (number(&phase["duty"]), number(&phase["metered"]));
        writeln!(text, "| {duty:.2} | {metered:.3} | {tool} | {} |", phase["passed"])?;
    }
    Ok(text)
}

/// Returns the table of step speeds, beside the peer's figures and the targets.
fn measured(speed: &Value, peer: &Value) -> Result<String, Box<dyn Error>> {
    let cases = speed["cases"].as_array().ok_or("speed.json has no cases")?;
    let (measured, failed): (Vec<&Value>, Vec<&Value>) =
        cases.iter().partition(|case| case["passed"] != false);
    let device = measured.first().and_then(|it| it["device"].as_str());
    let mut text = format!(
        "{}; aims are for an H200: bound / milestone / target.\n\n\
         | shape, way | batch | tokens/s | bytes over copy | peer | over peer | aims |\n\
         |---|---|---|---|---|---|---|\n",
        device.unwrap_or("unknown device")
    );
    for &shape in &measured {
        for decode in shape["decode"].as_array().into_iter().flatten() {
            text.push_str(&row(shape, decode, peer)?);
        }
        text.push_str(&row(shape, &shape["prefill"], peer)?);
    }
    for case in failed {
        writeln!(text, "| {} | {} | | | | | |", said(&case["case"]), cell(said(&case["why"])))?;
    }
    text.push_str("\n| shape | batch | operation | us | bytes over copy | TFLOP/s |\n");
    text.push_str("|---|---|---|---|---|---|\n");
    let each = measured.into_iter().filter(|shape| shape["launches"] == "overlapping");
    for shape in each {
        let decode = shape["decode"].as_array().into_iter().flatten();
        for measured in decode.chain([&shape["prefill"]]) {
            for operation in measured["operations"].as_array().into_iter().flatten() {
                writeln!(
                    text,
                    "| {} | {} | {} | {:.1} | {:.2} | {:.1} |",
                    way(shape),
                    batch(measured),
                    said(&operation["operation"]),
                    number(&operation["device_ns"]) / 1e3,
                    number(&operation["bytes_over_copy"]),
                    number(&operation["tflop_per_second"]),
                )?;
            }
        }
    }
    Ok(text)
}

fn row(shape: &Value, measured: &Value, peer: &Value) -> Result<String, Box<dyn Error>> {
    let (name, batch) = (said(&shape["shape"]), batch(measured));
    let mut text = String::new();
    if let Some(why) = measured["why_not"].as_str() {
        writeln!(text, "| {} | {batch} | {why} | | | | |", way(shape))?;
        return Ok(text);
    }
    let ours = number(&measured["tokens_per_second"]);
    let theirs = &peer["measured"][name];
    let theirs = match batch.as_str() {
        "prompt" => theirs["prefill"]["tokens_per_second"].as_f64(),
        batch => theirs["decode"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|it| it["batch"].as_u64() == batch.parse().ok())
            .and_then(|it| it["tokens_per_second"].as_f64()),
    };
    let aims = AIMS.iter().find(|aim| aim.0 == name && aim.1 == batch);
    let aims = aims.map(|(_, _, aims)| aims.map(|aim| format!("{aim:.0}")).join(" / "));
    let share = measured["bytes_read_over_copy"].as_f64();
    writeln!(
        text,
        "| {} | {batch} | {ours:.0} | {} | {} | {} | {} |",
        way(shape),
        share.map(|share| format!("{share:.2}")).unwrap_or_default(),
        theirs.map(|theirs| format!("{theirs:.0}")).unwrap_or_default(),
        theirs.map(|theirs| format!("{:.1}", ours / theirs)).unwrap_or_default(),
        aims.unwrap_or_default(),
    )?;
    Ok(text)
}

fn way(shape: &Value) -> String {
    let name = said(&shape["shape"]);
    let products = match shape["vendor_products"].as_bool() {
        Some(true) => "",
        _ => ", own products",
    };
    let deterministic = if shape["kernels"] == "deterministic" { ", deterministic" } else { "" };
    let launches = match said(&shape["launches"]) {
        "overlapping" => "",
        "single" => ", no graphs",
        _ => ", no overlap",
    };
    format!("{name}{products}{deterministic}{launches}")
}

/// Returns the batch size as text, or that the step read a prompt.
fn batch(measured: &Value) -> String {
    measured["batch"].as_u64().map_or_else(|| "prompt".to_owned(), |batch| batch.to_string())
}

/// Returns a text of several lines as one cell.
fn cell(text: &str) -> String {
    text.replace('|', "/").split_whitespace().collect::<Vec<_>>().join(" ")
}

fn said(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}
