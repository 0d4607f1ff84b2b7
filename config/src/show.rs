//! The config in force: every key with its value and its place. The output is
//! itself a config that loads to the same values.

use std::collections::BTreeMap;

use crate::problem::Place;
use crate::read::{Section, Visited, join};
use crate::sections::Root;
use crate::tree::Table;

/// The column of the places, if the value leaves room.
const COLUMN: usize = 48;

pub(crate) fn whole(root: &Root, tree: &Table) -> String {
    let mut places = BTreeMap::new();
    collect(tree, "", &mut places);
    let mut text = String::new();
    root.visit("", &mut |visited| match visited {
        Visited::Table { key: "" | "auth", .. } => {} // nothing of their own under a header
        Visited::Table { key, .. } => text.push_str(&format!("\n[{key}]\n")),
        Visited::Field { key, value, .. } => {
            let (_, name) = key.rsplit_once('.').unwrap_or(("", key));
            let place = places.get(key).unwrap_or(&Place::Default);
            let line = match value {
                Some(value) => format!("{name} = {value}"),
                // A comment keeps the output loadable.
                None => format!("# {name} is not set"),
            };
            text.push_str(&format!("{line:COLUMN$}  # {place}\n"));
        }
    });
    text
}

/// Collects the place of every key, by its dotted name.
pub(crate) fn collect(table: &Table, path: &str, places: &mut BTreeMap<String, Place>) {
    for (key, node) in table {
        let dotted = join(path, key);
        if let Some(below) = node.table() {
            collect(below, &dotted, places);
        }
        // For tables, too: a rate or a limit by class is one key with a table as its value.
        places.insert(dotted, node.place.clone());
    }
}
