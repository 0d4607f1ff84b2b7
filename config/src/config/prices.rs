//! The resolution of price lists to one price book. A book has one currency, and on
//! each day one list for a plan.

use std::collections::BTreeMap;
use std::sync::Arc;

use tollgate_domain::{Currency, PlanName, PriceBook, PriceList, PriceListName, UtcDay};

use super::Plan;
use super::check::{Checker, dotted};
use crate::sections::RawPriceList;

impl Checker<'_> {
    /// Returns the price book, if there are lists and all of them are valid.
    pub(super) fn prices(&mut self, plans: &BTreeMap<PlanName, Arc<Plan>>) -> Option<PriceBook> {
        let root = self.root;
        let mut lists: Vec<PriceList> = Vec::new();
        for (name, raw) in &root.prices {
            lists.extend(self.price_list(name, raw, plans));
        }
        // The currencies are compared even if a list is invalid, so that all mistakes
        // are reported.
        let currency = self.currency()?;
        if lists.len() < root.prices.len() {
            return None; // the problems of the other lists are recorded
        }
        self.no_two_begin_together(&lists);
        Some(PriceBook { currency, lists })
    }

    fn price_list(
        &mut self,
        name: &PriceListName,
        raw: &RawPriceList,
        plans: &BTreeMap<PlanName, Arc<Plan>>,
    ) -> Option<PriceList> {
        let RawPriceList {
            from,
            plan,
            currency,
            per_device_second,
            per_million_prompt_tokens,
            per_million_completion_tokens,
        } = raw;
        for (key, missing) in [("from", from.is_none()), ("currency", currency.is_none())] {
            let keys = ["prices", name.as_str(), key];
            if missing && !self.is_given(&keys) {
                self.problem(&keys, "is required");
            }
        }
        if let Some(plan) = plan {
            // A list for an unknown plan is dropped, so that it never applies to
            // other tenants.
            self.named_plan(&["prices", name.as_str(), "plan"], Some(plan), plans)?;
        }
        Some(PriceList {
            name: name.clone(),
            plan: plan.clone(),
            from: (*from)?,
            device_second: per_device_second.clone(),
            million_prompt_tokens: *per_million_prompt_tokens,
            million_completion_tokens: *per_million_completion_tokens,
        })
    }

    /// Returns the currency of all lists.
    fn currency(&mut self) -> Option<Currency> {
        let root = self.root;
        let mut named =
            root.prices.iter().filter_map(|(name, raw)| Some((name.as_str(), raw.currency?)));
        let (first, currency) = named.next()?;
        for (name, other) in named.filter(|(_, other)| *other != currency) {
            let place = self.place(&["prices", first, "currency"]);
            let first = dotted(&["prices", first, "currency"]);
            self.problem(
                &["prices", name, "currency"],
                format!("{other} differs from {first}, {currency} ({place}); all lists must have the same currency"),
            );
        }
        Some(currency)
    }

    fn no_two_begin_together(&mut self, lists: &[PriceList]) {
        let mut known: BTreeMap<(&Option<PlanName>, UtcDay), &PriceList> = BTreeMap::new();
        for list in lists {
            let Some(other) = known.insert((&list.plan, list.from), list) else { continue };
            let (name, other) = (list.name.as_str(), other.name.as_str());
            let place = self.place(&["prices", other, "from"]);
            let other = dotted(&["prices", other, "from"]);
            self.problem(
                &["prices", name, "from"],
                format!(
                    "{other} begins on {}, too ({place}); a plan has one price list a day",
                    list.from
                ),
            );
        }
    }
}
