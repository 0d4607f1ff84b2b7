//! The random shapes with the largest effects on the gateway and on the honest
//! tenants.

use serde::Serialize;

use super::{Check, Verdict};
use crate::drill::{AttackerResult, Drill, ShapeResult};

/// Shapes in a list.
const SHOWN: usize = 10;

/// The worst shapes by one figure, the worst first.
#[derive(Clone, Debug, Serialize)]
pub struct WorstShapes {
    /// The figure with its unit.
    pub by: String,
    /// The shapes.
    pub shapes: Vec<WorstShape>,
}

/// A shape with its figure.
#[derive(Clone, Debug, Serialize)]
pub struct WorstShape {
    /// The number, which gives the same shape again with the same seed.
    pub number: u64,
    /// A description.
    pub about: String,
    /// The figure.
    pub value: f64,
}

/// Returns the lists; none if no random shape was played.
pub(super) fn worst(drill: &Drill) -> Vec<WorstShapes> {
    let shapes: Vec<&ShapeResult> = drill.attackers.iter().flat_map(|seen| &seen.shapes).collect();
    if shapes.is_empty() {
        return Vec::new();
    }
    let by = |name: &str, figure: &dyn Fn(&ShapeResult) -> Option<f64>| {
        let mut all: Vec<WorstShape> = shapes
            .iter()
            .filter_map(|shape| {
                let (number, about) = (shape.number, shape.about.clone());
                Some(WorstShape { number, about, value: figure(shape)? })
            })
            .collect();
        all.sort_by(|a, b| b.value.total_cmp(&a.value));
        all.truncate(SHOWN);
        WorstShapes { by: name.to_owned(), shapes: all }
    };
    vec![
        by("memory of the gateway, MiB", &|shape| {
            shape.memory.map(|bytes| bytes as f64 / f64::from(1 << 20))
        }),
        by("processor time of the gateway, ms", &|shape| {
            shape.cpu_seconds.map(|seconds| seconds * 1e3)
        }),
        by("slowest honest first token meanwhile, ms", &|shape| slowest(drill, shape)),
    ]
}

/// Returns the milliseconds of the slowest honest first token of requests that waited
/// while the shape was played.
fn slowest(drill: &Drill, shape: &ShapeResult) -> Option<f64> {
    let waits = drill.honest.iter().filter_map(|sample| {
        let wait = sample.outcome.first_token?.as_secs_f64();
        (sample.due < shape.to && sample.due + wait > shape.from).then_some(wait * 1e3)
    });
    waits.reduce(f64::max)
}

/// Checks that all shapes were played.
pub(super) fn played(wanted: u32, seen: &AttackerResult) -> Check {
    let played = seen.shapes.len();
    Check {
        what: "random shapes that were played".to_owned(),
        bound: format!("{wanted}"),
        observed: played.to_string(),
        verdict: if played >= wanted as usize { Verdict::Holds } else { Verdict::Unclear },
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::drill;
    use super::*;

    #[test]
    fn worst_shapes_come_first() {
        // One honest request, due at 30.0, waits for 900 ms.
        let mut run = drill(|at| if at == 30.0 { 900 } else { 10 });
        let shape = |number: u64| ShapeResult {
            number,
            about: format!("number {number}"),
            from: 20.05 + number as f64 * 0.1,
            to: 20.10 + number as f64 * 0.1,
            cpu_seconds: Some((number % 7) as f64),
            memory: None,
        };
        run.attackers[0].shapes = (0..150).map(shape).collect();
        let lists = worst(&run);
        assert!(lists[0].shapes.is_empty(), "memory is unknown");
        let by_cpu: Vec<u64> = lists[1].shapes.iter().map(|shape| shape.number).collect();
        assert_eq!(by_cpu, [6, 13, 20, 27, 34, 41, 48, 55, 62, 69]);
        assert_eq!((lists[2].shapes[0].number, lists[2].shapes[0].value), (100, 900.0));
        assert!(lists[2].shapes.iter().take(9).all(|shape| (100..=108).contains(&shape.number)));
        assert_eq!(played(150, &run.attackers[0]).verdict, Verdict::Holds);
        assert_eq!(played(151, &run.attackers[0]).verdict, Verdict::Unclear);
    }
}
