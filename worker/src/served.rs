//! The gateways that the worker serves: one, or several that share a ledger. Two ledgers would
//! bill the same device time twice.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tollgate_domain::GatewayName;
use tonic::{Request, Status};

/// The gateways that the worker serves, as long as one of their connections is open.
#[derive(Debug, Default)]
pub(crate) struct ServedGateways {
    // Weak, so that the claim ends with the last connection.
    current: Mutex<Weak<Served>>,
}

#[derive(Debug, PartialEq, Eq)]
enum Served {
    /// One gateway, with a ledger of its own.
    One(GatewayName),
    /// The gateways that share the ledger of this name.
    Sharing(String),
}

/// A gateway's connection, for the calls over it. Clones are the same connection.
#[derive(Clone, Debug)]
pub(crate) struct GatewayLink(Arc<LinkState>);

#[derive(Debug)]
struct LinkState {
    gateway: GatewayName,
    served: Arc<ServedGateways>,
    /// Held while the connection uses the worker.
    claim: Mutex<Option<Arc<Served>>>,
}

impl ServedGateways {
    /// Claims the worker for `gateway`, whose ledger has the name `ledger`; an empty name is a
    /// ledger of its own. A gateway that was restarted is the same one.
    fn claim(&self, gateway: &GatewayName, ledger: &str) -> Result<Arc<Served>, Status> {
        let asking = match ledger {
            "" => Served::One(gateway.clone()),
            ledger => Served::Sharing(ledger.to_owned()),
        };
        let mut current = self.lock();
        let found = current.upgrade();
        match found {
            Some(served) if *served == asking => return Ok(served),
            // The gateway has begun to share its ledger, and an old connection is still open.
            Some(served) if *served == Served::One(gateway.clone()) => {}
            Some(served) => return Err(refusal(gateway, &served)),
            None => {}
        }
        let claimed = Arc::new(asking);
        *current = Arc::downgrade(&claimed);
        match &*claimed {
            Served::One(_) => tracing::info!(%gateway, "connected; the worker serves this gateway"),
            Served::Sharing(ledger) => tracing::info!(
                %gateway, ledger,
                "connected; the worker serves this gateway, and all that share its ledger"
            ),
        }
        Ok(claimed)
    }

    /// Checks that a claim of `gateway` could be granted, as far as a connection of one gateway
    /// alone shows.
    fn check(&self, gateway: &GatewayName) -> Result<(), Status> {
        match self.lock().upgrade() {
            Some(served) if matches!(&*served, Served::One(serving) if serving != gateway) => {
                Err(refusal(gateway, &served))
            }
            _ => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Weak<Served>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn refusal(asking: &GatewayName, served: &Served) -> Status {
    let serving = match served {
        Served::One(serving) => format!("gateway {serving}"),
        Served::Sharing(_) => "gateways with another ledger".to_owned(),
    };
    Status::failed_precondition(format!(
        "the worker serves {serving}, so gateway {asking} cannot use it: two ledgers would bill the same device time"
    ))
}

impl GatewayLink {
    /// Makes the state of a connection that `gateway` has opened.
    pub(crate) fn new(gateway: GatewayName, served: Arc<ServedGateways>) -> Self {
        Self(Arc::new(LinkState { gateway, served, claim: Mutex::new(None) }))
    }

    /// Returns the gateway at the other end.
    pub(crate) fn gateway(&self) -> &GatewayName {
        &self.0.gateway
    }

    /// Claims the worker until the connection ends.
    fn announce(&self, ledger: &str) -> Result<(), Status> {
        let claimed = self.0.served.claim(&self.0.gateway, ledger)?;
        *self.claim() = Some(claimed);
        Ok(())
    }

    fn claim(&self) -> MutexGuard<'_, Option<Arc<Served>>> {
        self.0.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the connection of a call. Calls over a Unix socket have none: only the worker's own
/// user can reach the socket.
pub(crate) fn link_of<T>(request: &Request<T>) -> Option<&GatewayLink> {
    request.extensions().get()
}

/// Claims the worker for the gateway that announces itself. A `probe` claims nothing.
///
/// # Errors
/// The worker serves a gateway with another ledger.
pub(crate) fn announce<T>(request: &Request<T>, ledger: &str, probe: bool) -> Result<(), Status> {
    match link_of(request) {
        Some(link) if probe => link.0.served.check(&link.0.gateway),
        Some(link) => link.announce(ledger),
        None => Ok(()),
    }
}

/// Refuses a call of a gateway that has not announced itself.
///
/// # Errors
/// The connection has no claim.
pub(crate) fn check_claim<T>(request: &Request<T>) -> Result<(), Status> {
    match link_of(request) {
        Some(link) if link.claim().is_none() => {
            Err(Status::failed_precondition("the gateway has not announced itself"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

    use super::*;

    fn links() -> impl Fn(&str) -> GatewayLink {
        let served = Arc::<ServedGateways>::default();
        move |name| GatewayLink::new(GatewayName::new(name).unwrap(), Arc::clone(&served))
    }

    #[test]
    fn worker_serves_one_ledger_at_a_time() {
        let link = links();
        let first = link("a");
        first.announce("").unwrap();
        let error = link("b").announce("").unwrap_err();
        assert!(error.message().contains("serves gateway a, so gateway b cannot"), "{error}");
        assert!(link("b").announce("books").is_err());
        let again = link("a");
        again.announce("").unwrap();
        drop(first);
        assert!(link("b").announce("").is_err(), "one connection is open");
        drop(again);
        link("b").announce("").unwrap();
    }

    #[test]
    fn worker_serves_gateways_that_share_a_ledger() {
        let link = links();
        let open = [link("a"), link("b"), link("c")];
        open.iter().for_each(|link| link.announce("books").unwrap());
        let error = link("d").announce("others").unwrap_err();
        assert!(error.message().contains("gateways with another ledger"), "{error}");
        assert!(link("a").announce("").is_err(), "a ledger of its own is another one");
        drop(open);
        link("d").announce("others").unwrap();
    }

    #[test]
    fn worker_lets_a_gateway_begin_to_share() {
        let link = links();
        let before = link("a");
        before.announce("").unwrap();
        let (after, other) = (link("a"), link("b"));
        after.announce("books").unwrap();
        other.announce("books").unwrap();
        drop((before, after));
        link("c").announce("books").unwrap();
        assert!(link("a").announce("").is_err(), "b shares its ledger");
    }

    #[test]
    fn connection_is_used_after_its_announcement() {
        let link = links();
        let (a, b) = (link("a"), link("b"));
        let of = |link: &GatewayLink| {
            let mut request = Request::new(());
            request.extensions_mut().insert(link.clone());
            request
        };
        assert!(check_claim(&of(&a)).is_err());
        announce(&of(&a), "", true).unwrap();
        assert!(check_claim(&of(&a)).is_err(), "a probe claims nothing");
        announce(&of(&a), "", false).unwrap();
        check_claim(&of(&a)).unwrap();
        assert!(announce(&of(&b), "", true).is_err());
        check_claim(&Request::new(())).unwrap();
    }
}
