//! A checker for lost, doubled or altered data. It reads the ledger's rows, the
//! workers' journals and the clients' records, each in its own way, and compares them.
//! It shares no code with the product.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

pub mod books;
pub mod journals;

use books::{Incarnation, LedgerRows, Sums};
use journals::{Block, Epoch, Journals, Owner};

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
        let books = match LedgerRows::read(evidence.ledger) {
            Ok(books) => books,
            Err(error) => return vec![Finding::Altered(format!("the ledger: {error}"))],
        };
        match self.journals.read(evidence.journals) {
            Ok(epochs) => compare(&books, &epochs, &mut found),
            Err(what) => found.push(Finding::Altered(format!("a journal: {what}"))),
        }
        found.extend(books.odd.iter().cloned().map(Finding::Altered));
        charges(&books, &mut found);
        days(&books, evidence.caps, &mut found);
        clients(&books, evidence, &mut found);
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
fn compare(books: &LedgerRows, epochs: &BTreeMap<String, &Epoch>, found: &mut Vec<Finding>) {
    let mut finished = 0;
    for (name, life) in &books.lives {
        let Some(epoch) = epochs.get(name) else {
            found.push(Finding::Altered(format!("{name} is of no journal")));
            continue;
        };
        if life.blocks.len() as u64 != life.last_block {
            let (there, last) = (life.blocks.len(), life.last_block);
            found.push(Finding::Lost(format!("{name}: {there} of {last} blocks")));
        }
        for (number, sums) in &life.blocks {
            let Some(block) = epoch.blocks.get(number) else {
                found.push(Finding::Double(format!("block {number} of {name} was never written")));
                continue;
            };
            finished += block.finished.len();
            same_block(books, (name, *number), (sums, block), found);
        }
    }
    if books.ended.len() > finished {
        let more = books.ended.len() - finished;
        found.push(Finding::Double(format!("{more} ends of attempts that no journal has")));
    }
    for (name, epoch) in epochs.iter().filter(|(_, epoch)| epoch.has_ended()) {
        let written = epoch.blocks.len();
        let life = books.lives.get(name);
        let there = life.map_or(0, |life| life.blocks.len());
        if there < written || !life.is_some_and(|life| life.ended) {
            found.push(Finding::Lost(format!("{name}: {there} of the {written} blocks written")));
        }
    }
}

fn same_block(
    books: &LedgerRows,
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
        match books.ended.get(owner) {
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
fn charges(books: &LedgerRows, found: &mut Vec<Finding>) {
    for (owner, (.., end)) in &books.ended {
        let paid = books.paid.get(owner).copied().unwrap_or(0);
        let Some(charge) = books.charged.get(owner) else {
            found.push(Finding::Lost(format!("the charge of {owner:?}")));
            continue;
        };
        if books.measured.get(owner).copied().unwrap_or(0) != end.figures[3] {
            found.push(Finding::Altered(format!("{owner:?} measured otherwise than {end:?}")));
        }
        let [prompt, cached, completion, attributed, reference] = end.figures;
        let told = [prompt, cached, completion, 0, reference];
        if !books.caps.contains_key(owner) && (charge.figures != told || paid != attributed) {
            found.push(Finding::Altered(format!("{owner:?} pays {paid}, {charge:?}, for {end:?}")));
        }
    }
    for (owner, cap) in &books.caps {
        let measured = books.measured.get(owner).copied().unwrap_or(0);
        let paid = books.paid.get(owner).copied().unwrap_or(0);
        if paid != measured.min(cap[3]) {
            let what = format!("{owner:?} pays {paid} of {measured} where {cap:?} is the most");
            found.push(Finding::Altered(what));
        }
    }
    let living: HashSet<&Owner> =
        books.lives.values().filter(|life| !life.ended).flat_map(owners).collect();
    for owner in books.measured.keys().filter(|owner| !living.contains(owner)) {
        if !books.ended.contains_key(owner) && !books.caps.contains_key(owner) {
            found.push(Finding::Lost(format!("who pays for {owner:?}, which never ended")));
        }
    }
    let mut counted: HashMap<(&str, &str), u32> = HashMap::new();
    for (owner, charge) in &books.charged {
        if !books.ended.contains_key(owner) && !books.caps.contains_key(owner) {
            found.push(Finding::Double(format!("a charge out of nothing: {owner:?}")));
        }
        *counted.entry((&owner.tenant, &owner.request)).or_default() += u32::from(charge.counted);
    }
    for (request, times) in counted.iter().filter(|(_, times)| **times > 1) {
        found.push(Finding::Double(format!("{request:?} is charged {times} times")));
    }
}

fn owners(life: &Incarnation) -> impl Iterator<Item = &Owner> {
    life.blocks.values().flat_map(|sums| sums.shares.keys())
}

fn days(books: &LedgerRows, caps: &[(&str, i64)], found: &mut Vec<Finding>) {
    let worth = |sums: &BTreeMap<(i64, String, String), [i64; 6]>| {
        let mut sums = sums.clone();
        sums.retain(|_, sums| *sums != [0; 6]);
        sums
    };
    if worth(&books.daily) != worth(&books.recount) {
        let what = format!("sums by day {:?}, counted {:?}", books.daily, books.recount);
        found.push(Finding::Altered(what));
    }
    let mut spent: HashMap<(i64, &str), i64> = HashMap::new();
    for (owner, charge) in &books.charged {
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
fn clients(books: &LedgerRows, evidence: &Evidence<'_>, found: &mut Vec<Finding>) {
    let mut charges: HashMap<&str, Vec<&Owner>> = HashMap::new();
    for owner in books.charged.keys().chain(books.measured.keys()) {
        let owners = charges.entry(&owner.request).or_default();
        if !owners.contains(&owner) {
            owners.push(owner);
        }
    }
    for told in evidence.clients {
        if let End::Wrong(what) = &told.end {
            found.push(Finding::Client(format!("{:?}: {what}", told.id)));
        }
        let Some(id) = &told.id else { continue };
        let owners = charges.remove(id.as_str()).unwrap_or_default();
        if owners.iter().any(|owner| owner.tenant != told.tenant) {
            found.push(Finding::Altered(format!("{id} of {} is on another's bill", told.tenant)));
        }
        let rows = owners.iter().filter_map(|owner| books.charged.get(owner));
        let rows: Vec<_> = rows.filter(|row| row.counted).collect();
        let paid: i64 = owners.iter().filter_map(|owner| books.paid.get(owner)).sum();
        match (&told.end, &rows[..]) {
            (End::Whole { .. }, []) => {
                found.push(Finding::Lost(format!("{id}, which was answered")))
            }
            (End::Whole { prompt, completion }, [row, ..]) => {
                let figures = [*prompt as i64, *completion as i64];
                if [row.figures[0], row.figures[2]] != figures || paid <= 0 || row.reason == "fault"
                {
                    found.push(Finding::Altered(format!(
                        "{id}: {told:?}, charged {row:?}, {paid} ns"
                    )));
                }
            }
            (End::Refused(status), rows) if !rows.is_empty() || paid != 0 => {
                found.push(Finding::Double(format!("{id} got {status} and pays {paid} ns")));
            }
            (End::Failed, [row]) if row.figures[2] > told.content as i64 => {
                let what = format!("{id} pays {} tokens of {}", row.figures[2], told.content);
                found.push(Finding::Altered(what));
            }
            _ => {}
        }
    }
    if charges.len() > evidence.unnamed {
        let (there, sent) = (charges.len(), evidence.unnamed);
        found.push(Finding::Double(format!("{there} requests that nobody knows, of {sent} sent")));
    }
    for (id, &(attributed, reference)) in evidence.posted {
        let of = |owner: &&Owner| owner.request == *id;
        let paid: i64 = books.paid.iter().filter(|(it, _)| of(it)).map(|(_, ns)| ns).sum();
        let cost = books.charged.iter().filter(|(it, _)| of(it)).map(|(_, row)| row.figures[4]);
        if (paid, cost.sum::<i64>()) != (attributed as i64, reference as i64) {
            found.push(Finding::Altered(format!("{id} was final with {attributed} ns")));
        }
    }
}
