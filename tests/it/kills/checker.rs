//! A checker for lost, doubled or altered data. It reads the ledger's rows, the
//! workers' journals and the clients' records, each in its own way, and compares them.
//! It shares no code with the product.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

pub mod journals;
pub mod ledger_copy;

use journals::{Block, Epoch, Journals, Owner};
use ledger_copy::{Incarnation, LedgerRows, Sums};

/// A client's record of one request.
#[derive(Clone, Debug)]
pub struct ClientRecord {
    /// The request's id, if the response headers arrived.
    pub id: Option<String>,
    pub tenant: &'static str,
    /// The tokens of content that arrived.
    pub content: u64,
    pub end: End,
}

/// The end of a request as the client saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// A complete answer, with its usage.
    Whole { prompt: u64, completion: u64 },
    /// A status and one error: no work was done, or no work is charged.
    Refused(u16),
    /// A started stream that one error event ended.
    Failed,
    /// A broken connection.
    Cut,
    /// A disconnect by the client.
    Left,
    /// An end that no client may see.
    Wrong(String),
}

/// The data to compare.
pub struct Evidence<'a> {
    /// The ledger's file.
    pub ledger: &'a Path,
    /// A folder with every journal file of the run.
    pub journals: &'a Path,
    pub clients: &'a [ClientRecord],
    /// The number of requests without an id at any client.
    pub unnamed: usize,
    /// The daily cap of reference cost, ns, by tenant.
    pub caps: &'a [(&'a str, i64)],
    /// The figures once reported as final, by request: attributed, reference.
    pub posted: &'a HashMap<String, (u64, u64)>,
}

/// A difference between the sources.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// An acknowledged row that is missing.
    Lost(String),
    /// A row that is there more than once.
    Double(String),
    /// A row with other values, or a wrong sum.
    Altered(String),
    /// A tenant above its cap.
    OverCap(String),
    /// A client with no end, or with more than one.
    Client(String),
}

/// A checker that remembers closed journals between checks.
#[derive(Default)]
pub struct Checker {
    journals: Journals,
}

impl Checker {
    /// Compares all sources and returns every difference.
    pub fn findings(&mut self, evidence: &Evidence<'_>) -> Vec<Finding> {
        let mut found = Vec::new();
        // The ledger is read first: its blocks were in a journal before.
        let ledger = match LedgerRows::read(evidence.ledger) {
            Ok(ledger) => ledger,
            Err(error) => return vec![Finding::Altered(format!("the ledger: {error}"))],
        };
        match self.journals.read(evidence.journals) {
            Ok(epochs) => compare(&ledger, &epochs, &mut found),
            Err(what) => found.push(Finding::Altered(format!("a journal: {what}"))),
        }
        found.extend(ledger.odd.iter().cloned().map(Finding::Altered));
        charges(&ledger, &mut found);
        days(&ledger, evidence.caps, &mut found);
        clients(&ledger, evidence, &mut found);
        found
    }
}

impl Checker {
    /// Returns the time, ns, between a worker's last record and its kill: the length of
    /// the interrupted step is unknown.
    pub fn uncounted_before(&self, kill: u64) -> u64 {
        let ends = self.journals.ends().filter(|end| *end <= kill);
        ends.max().map_or(0, |end| kill - end)
    }
}

/// Checks that the ledger has each block of a journal once and unchanged, and no other
/// block.
fn compare(ledger: &LedgerRows, epochs: &BTreeMap<String, &Epoch>, found: &mut Vec<Finding>) {
    let mut finished = 0;
    for (name, incarnation) in &ledger.incarnations {
        let Some(epoch) = epochs.get(name) else {
            found.push(Finding::Altered(format!("no journal has epoch {name}")));
            continue;
        };
        if incarnation.blocks.len() as u64 != incarnation.last_block {
            let (there, last) = (incarnation.blocks.len(), incarnation.last_block);
            found.push(Finding::Lost(format!("{name}: {there} of {last} blocks")));
        }
        for (number, sums) in &incarnation.blocks {
            let Some(block) = epoch.blocks.get(number) else {
                found.push(Finding::Double(format!("block {number} of {name} was never written")));
                continue;
            };
            finished += block.finished.len();
            same_block(ledger, (name, *number), (sums, block), found);
        }
    }
    if ledger.ended.len() > finished {
        let more = ledger.ended.len() - finished;
        found.push(Finding::Double(format!("{more} ends of attempts that no journal has")));
    }
    for (name, epoch) in epochs.iter().filter(|(_, epoch)| epoch.has_ended()) {
        let written = epoch.blocks.len();
        let incarnation = ledger.incarnations.get(name);
        let there = incarnation.map_or(0, |incarnation| incarnation.blocks.len());
        if there < written || !incarnation.is_some_and(|incarnation| incarnation.ended) {
            found.push(Finding::Lost(format!("{name}: {there} of the {written} blocks written")));
        }
    }
}

fn same_block(
    ledger: &LedgerRows,
    (epoch, number): (&String, u64),
    (sums, block): (&Sums, &Block),
    found: &mut Vec<Finding>,
) {
    let signed = |ns: u64| i64::try_from(ns).expect("a test is short");
    let written = Sums {
        device: -signed(block.wall),
        overhead: signed(block.overhead),
        idle: signed(block.idle),
        loss: signed(block.loss),
        shares: block.shares.iter().map(|(owner, ns)| (owner.clone(), signed(*ns))).collect(),
        corrections: 0,
    };
    if *sums != written {
        let what = format!("block {number} of {epoch}: {sums:?} where {written:?} was written");
        found.push(Finding::Altered(what));
    }
    let total = sums.overhead + sums.idle + sums.loss + sums.shares.values().sum::<i64>();
    if total + sums.device != 0 {
        found.push(Finding::Altered(format!("block {number} of {epoch} sums to {total}")));
    }
    for (owner, (figures, reason)) in &block.finished {
        let figures = figures.map(signed);
        match ledger.ended.get(owner) {
            None => found.push(Finding::Lost(format!("the end of {owner:?}"))),
            Some((there, at, row))
                if (there, *at, &*row.reason) != (epoch, number, *reason)
                    || row.figures != figures =>
            {
                found.push(Finding::Altered(format!("the end of {owner:?}: {row:?}")));
            }
            Some(_) => {}
        }
    }
}

/// Checks that an ended attempt is charged its measured time or its cap, that an
/// unfinished attempt has a cap, and that one attempt of a request is charged.
fn charges(ledger: &LedgerRows, found: &mut Vec<Finding>) {
    for (owner, (.., end)) in &ledger.ended {
        let paid = ledger.paid.get(owner).copied().unwrap_or(0);
        let Some(charge) = ledger.charged.get(owner) else {
            found.push(Finding::Lost(format!("the charge of {owner:?}")));
            continue;
        };
        if ledger.measured.get(owner).copied().unwrap_or(0) != end.figures[3] {
            found.push(Finding::Altered(format!("{owner:?} measured otherwise than {end:?}")));
        }
        let [prompt, cached, completion, attributed, reference] = end.figures;
        let reported = [prompt, cached, completion, 0, reference];
        if !ledger.caps.contains_key(owner) && (charge.figures != reported || paid != attributed) {
            found.push(Finding::Altered(format!("{owner:?} pays {paid}, {charge:?}, for {end:?}")));
        }
    }
    for (owner, cap) in &ledger.caps {
        let measured = ledger.measured.get(owner).copied().unwrap_or(0);
        let paid = ledger.paid.get(owner).copied().unwrap_or(0);
        if paid != measured.min(cap[3]) {
            let what = format!("{owner:?} pays {paid} of {measured} where {cap:?} is the most");
            found.push(Finding::Altered(what));
        }
    }
    let living: HashSet<&Owner> = ledger
        .incarnations
        .values()
        .filter(|incarnation| !incarnation.ended)
        .flat_map(owners)
        .collect();
    for owner in ledger.measured.keys().filter(|owner| !living.contains(owner)) {
        if !ledger.ended.contains_key(owner) && !ledger.caps.contains_key(owner) {
            found
                .push(Finding::Lost(format!("a charge or a cap for {owner:?}, which never ended")));
        }
    }
    let mut counted: HashMap<(&str, &str), u32> = HashMap::new();
    for (owner, charge) in &ledger.charged {
        if !ledger.ended.contains_key(owner) && !ledger.caps.contains_key(owner) {
            found.push(Finding::Double(format!("a charge without an attempt: {owner:?}")));
        }
        *counted.entry((&owner.tenant, &owner.request)).or_default() += u32::from(charge.counted);
    }
    for (request, times) in counted.iter().filter(|(_, times)| **times > 1) {
        found.push(Finding::Double(format!("{request:?} is charged {times} times")));
    }
}

fn owners(incarnation: &Incarnation) -> impl Iterator<Item = &Owner> {
    incarnation.blocks.values().flat_map(|sums| sums.shares.keys())
}

fn days(ledger: &LedgerRows, caps: &[(&str, i64)], found: &mut Vec<Finding>) {
    let worth = |sums: &BTreeMap<(i64, String, String), [i64; 6]>| {
        let mut sums = sums.clone();
        sums.retain(|_, sums| *sums != [0; 6]);
        sums
    };
    if worth(&ledger.daily) != worth(&ledger.recount) {
        let what = format!("sums by day {:?}, counted {:?}", ledger.daily, ledger.recount);
        found.push(Finding::Altered(what));
    }
    let mut spent: HashMap<(i64, &str), i64> = HashMap::new();
    for (owner, charge) in &ledger.charged {
        *spent.entry((charge.day, &owner.tenant)).or_default() += charge.figures[4];
    }
    for &(tenant, cap) in caps {
        for ((day, _), spent) in
            spent.iter().filter(|((_, spender), spent)| *spender == tenant && **spent > cap)
        {
            found.push(Finding::OverCap(format!("{tenant} spent {spent} of {cap} on day {day}")));
        }
    }
}

/// Checks that an answered request is charged once with its figures, and a refused one
/// is not.
fn clients(ledger: &LedgerRows, evidence: &Evidence<'_>, found: &mut Vec<Finding>) {
    let mut charges: HashMap<&str, Vec<&Owner>> = HashMap::new();
    for owner in ledger.charged.keys().chain(ledger.measured.keys()) {
        let owners = charges.entry(&owner.request).or_default();
        if !owners.contains(&owner) {
            owners.push(owner);
        }
    }
    for client in evidence.clients {
        if let End::Wrong(what) = &client.end {
            found.push(Finding::Client(format!("{:?}: {what}", client.id)));
        }
        let Some(id) = &client.id else { continue };
        let owners = charges.remove(id.as_str()).unwrap_or_default();
        if owners.iter().any(|owner| owner.tenant != client.tenant) {
            found.push(Finding::Altered(format!(
                "{id} of {} is charged to another tenant",
                client.tenant
            )));
        }
        let rows = owners.iter().filter_map(|owner| ledger.charged.get(owner));
        let rows: Vec<_> = rows.filter(|row| row.counted).collect();
        let paid: i64 = owners.iter().filter_map(|owner| ledger.paid.get(owner)).sum();
        match (&client.end, &rows[..]) {
            (End::Whole { .. }, []) => {
                found.push(Finding::Lost(format!("{id}, which was answered")))
            }
            (End::Whole { prompt, completion }, [row, ..]) => {
                let figures = [*prompt as i64, *completion as i64];
                if [row.figures[0], row.figures[2]] != figures || paid <= 0 || row.reason == "fault"
                {
                    found.push(Finding::Altered(format!(
                        "{id}: {client:?}, charged {row:?}, {paid} ns"
                    )));
                }
            }
            (End::Refused(status), rows) if !rows.is_empty() || paid != 0 => {
                found.push(Finding::Double(format!("{id} got {status} and pays {paid} ns")));
            }
            (End::Failed, [row]) if row.figures[2] > client.content as i64 => {
                let what = format!("{id} pays {} tokens of {}", row.figures[2], client.content);
                found.push(Finding::Altered(what));
            }
            _ => {}
        }
    }
    if charges.len() > evidence.unnamed {
        let (there, sent) = (charges.len(), evidence.unnamed);
        found.push(Finding::Double(format!(
            "{there} charged requests without a client's record, at most {sent}"
        )));
    }
    for (id, &(attributed, reference)) in evidence.posted {
        let of = |owner: &&Owner| owner.request == *id;
        let paid: i64 = ledger.paid.iter().filter(|(it, _)| of(it)).map(|(_, ns)| ns).sum();
        let cost = ledger.charged.iter().filter(|(it, _)| of(it)).map(|(_, row)| row.figures[4]);
        if (paid, cost.sum::<i64>()) != (attributed as i64, reference as i64) {
            found
                .push(Finding::Altered(format!("{id} was reported as final with {attributed} ns")));
        }
    }
}
