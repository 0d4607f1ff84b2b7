//! The resolution of price lists to one price book. A book has one currency, and on
//! each day one list for a plan.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tollgate_domain::{Currency, ModelName, PlanName, PriceBook, PriceList, PriceListName};

use super::Plan;
use super::check::{Checker, dotted, unknown_text};
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
        self.most_specific_list_is_clear(&lists);
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
            model,
            retired,
            currency,
            per_device_second,
            per_million_prompt_tokens,
            per_million_completion_tokens,
            batch,
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
        self.priced_model(name, model.as_ref(), *retired)?;
        Some(PriceList {
            name: name.clone(),
            plan: plan.clone(),
            model: model.clone(),
            from: (*from)?,
            device_second: per_device_second.clone(),
            million_prompt_tokens: *per_million_prompt_tokens,
            million_completion_tokens: *per_million_completion_tokens,
            batch: *batch,
        })
    }

    /// Checks the model of a list. Returns `None` if the list must be dropped, so that it
    /// never applies to other models.
    fn priced_model(
        &mut self,
        list: &PriceListName,
        model: Option<&ModelName>,
        retired: bool,
    ) -> Option<()> {
        let keys = ["prices", list.as_str(), "model"];
        let Some(model) = model else {
            if self.is_given(&keys) {
                return None; // reported already
            }
            if retired {
                self.problem(&["prices", list.as_str(), "retired"], "also needs model");
            }
            return Some(());
        };
        if retired || self.root.models.contains_key(model) {
            return Some(());
        }
        let known = self.root.models.keys().map(ModelName::as_str);
        let unknown = unknown_text("model", model.as_str(), known);
        self.problem(
            &keys,
            format!("{unknown}; for a model that is no longer served, set retired = true"),
        );
        None
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

    /// Checks that the price lists are in the currency of every budget.
    pub(super) fn budgets_have_prices(&mut self) {
        let root = self.root;
        let currencies: BTreeSet<Currency> =
            root.prices.values().filter_map(|list| list.currency).collect();
        for (plan, raw) in &root.plans {
            let Some(budget) = raw.budget_per_month else { continue };
            let wanted = budget.currency;
            let problem = match currencies.first() {
                _ if currencies.contains(&wanted) => continue,
                // An invalid price list is reported already.
                None if !root.prices.is_empty() => continue,
                None => format!("also needs a price list in {wanted} ([prices.NAME])"),
                Some(other) => format!("no price list is in {wanted}; the lists are in {other}"),
            };
            self.problem(&["plans", plan.as_str(), "budget_per_month"], problem);
        }
    }

    fn no_two_begin_together(&mut self, lists: &[PriceList]) {
        let mut known: BTreeMap<_, &PriceList> = BTreeMap::new();
        for list in lists {
            let same = (&list.plan, &list.model, list.from);
            let Some(other) = known.insert(same, list) else { continue };
            let (name, other) = (list.name.as_str(), other.name.as_str());
            let place = self.place(&["prices", other, "from"]);
            let other = dotted(&["prices", other, "from"]);
            self.problem(
                &["prices", name, "from"],
                format!(
                    "{other} begins on {}, too ({place}); a plan has one price list a day for a model",
                    list.from
                ),
            );
        }
    }

    /// Checks that no usage has both a list of its plan and a list of its model without a
    /// list of both: neither is more specific than the other.
    fn most_specific_list_is_clear(&mut self, lists: &[PriceList]) {
        let mut first: BTreeMap<_, &PriceList> = BTreeMap::new();
        for list in lists {
            // Only the first day counts: from then on some list of this plan and model is always in
            // force.
            let earliest = first.entry((list.plan.as_ref(), list.model.as_ref())).or_insert(list);
            if list.from < earliest.from {
                *earliest = list;
            }
        }
        let of_plan = first.iter().filter_map(|((plan, model), list)| match (plan, model) {
            (Some(plan), None) => Some((*plan, *list)),
            _ => None,
        });
        let of_model = |((plan, model), list): (&(_, Option<_>), &_)| match (plan, model) {
            (None::<&PlanName>, Some(model)) => Some((*model, *list)),
            _ => None,
        };
        for (plan, by_plan) in of_plan {
            for (model, by_model) in first.iter().filter_map(of_model) {
                let day = by_plan.from.max(by_model.from);
                let both = first.get(&(Some(plan), Some(model)));
                if both.is_some_and(|both| both.from <= day) {
                    continue;
                }
                let (name, other) = (by_model.name.as_str(), by_plan.name.as_str());
                let place = self.place(&["prices", other, "plan"]);
                let other = dotted(&["prices", other]);
                self.problem(
                    &["prices", name, "model"],
                    format!(
                        "from {day} on, {other} ({place}) applies to this model under plan {:?}, \
                         too; write a list with plan = {:?} and model = {:?} that begins by then",
                        plan.as_str(),
                        plan.as_str(),
                        model.as_str()
                    ),
                );
            }
        }
    }
}
