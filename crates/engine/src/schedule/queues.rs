//! What waits: a queue for each tenant, served in turn.

use std::collections::{BTreeSet, HashMap, VecDeque};

use tollgate_domain::{MonotonicTime, SequenceId, TenantId};

use super::Rows;

/// A prompt that has not started.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// The sequence of its first choice.
    pub leader: SequenceId,
    /// Its request, by that one's first sequence.
    pub request: SequenceId,
    /// Whose turn it takes.
    pub tenant: TenantId,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens a sequence of it may come to.
    pub most: u32,
    /// Which rows of logits its tokens want.
    pub rows: Rows,
    /// Choices beside the first.
    pub followers: u32,
    /// When its request is refused; on its first prompt only.
    pub deadline: Option<MonotonicTime>,
}

/// The queues. Bounded by whoever fills them; a tenant is kept only while
/// something of it waits.
#[derive(Debug, Default)]
pub struct Queues {
    tenants: HashMap<TenantId, VecDeque<Waiting>>,
    /// Every tenant with something waiting, next turn first.
    rotation: VecDeque<TenantId>,
    deadlines: BTreeSet<(MonotonicTime, SequenceId)>,
}

impl Queues {
    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.rotation.is_empty()
    }

    /// Puts a prompt at the end of its tenant's queue.
    pub fn push(&mut self, waiting: Waiting) {
        if let Some(deadline) = waiting.deadline {
            self.deadlines.insert((deadline, waiting.request));
        }
        let queue = self.tenants.entry(waiting.tenant.clone()).or_default();
        if queue.is_empty() {
            self.rotation.push_back(waiting.tenant.clone());
        }
        queue.push_back(waiting);
    }

    /// What waits, in the order of its turns: each tenant's first, then each
    /// one's second, and so on.
    pub fn in_turn(&self) -> impl Iterator<Item = &Waiting> {
        let deepest = self.tenants.values().map(VecDeque::len).max().unwrap_or(0);
        (0..deepest).flat_map(move |depth| {
            self.rotation.iter().filter_map(move |tenant| self.tenants[tenant].get(depth))
        })
    }

    /// Requests, by their first sequence, that waited past their deadline.
    pub fn expired(&self, now: MonotonicTime) -> impl Iterator<Item = SequenceId> {
        self.deadlines
            .iter()
            .take_while(move |(deadline, _)| *deadline < now)
            .map(|(_, request)| *request)
    }

    /// Takes the prompt that is first in its tenant's queue; that tenant's next
    /// turn comes after everyone else's. `None` if it is not first.
    pub fn start(&mut self, tenant: &TenantId, leader: SequenceId) -> Option<Waiting> {
        let queue = self.tenants.get_mut(tenant)?;
        if queue.front()?.leader != leader {
            return None;
        }
        let waiting = queue.pop_front()?;
        let emptied = queue.is_empty();
        self.rotation.retain(|other| other != tenant);
        if emptied {
            self.tenants.remove(tenant);
        } else {
            self.rotation.push_back(tenant.clone());
        }
        self.forget_deadline(&waiting);
        Some(waiting)
    }

    /// Takes out all that waits of a request; says how many prompts that was.
    pub fn remove(&mut self, tenant: &TenantId, request: SequenceId) -> usize {
        let Some(queue) = self.tenants.get_mut(tenant) else { return 0 };
        let (gone, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(queue).into_iter().partition(|waiting| waiting.request == request);
        *queue = kept;
        if queue.is_empty() {
            self.tenants.remove(tenant);
            self.rotation.retain(|other| other != tenant);
        }
        for waiting in &gone {
            self.forget_deadline(waiting);
        }
        gone.len()
    }

    fn forget_deadline(&mut self, waiting: &Waiting) {
        if let Some(deadline) = waiting.deadline {
            self.deadlines.remove(&(deadline, waiting.request));
        }
    }
}
