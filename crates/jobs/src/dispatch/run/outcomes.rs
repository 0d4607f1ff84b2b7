//! The ends of a batch's tries: the answers, the failures, and the lines that run again.

use tokio::time::Instant;

use super::{BatchRun, HELD_BACK_WAIT, WAITS};
use crate::batch::{Cause, TryUsage};
use crate::dispatch::answers::NewAnswer;
use crate::dispatch::source::NextTry;
use crate::dispatch::try_run::{self, AfterCap, LineEvent, RanTry};
use crate::dispatch::{LOSSES_BEFORE_ALONE, MOST_LOSSES, now};
use crate::figures::LineOutcome;
use crate::line::{Line, answer_line};
use crate::rules::ROOM_OF_A_LINE;
use crate::service::{LineAnswer, LineFailure, TryOutcome};

impl BatchRun {
    /// Acts on an event of a line while the batch runs.
    pub(in crate::dispatch) fn happened(&mut self, event: LineEvent) {
        if event.ends_hold() {
            self.make_room();
        }
        match event {
            LineEvent::Ran(next, RanTry::InTime(outcome)) => self.ran(next, outcome),
            LineEvent::Ran(next, RanTry::Late(outcome)) => self.ran_late(next, outcome),
            // The cap is in the ledger, so the try is settled whatever its worker still reports.
            LineEvent::Capped(next, AfterCap::FailLate) => {
                self.open.remove(&next.line.number);
                let limit = self.context.options.line;
                self.fail(&next, LineFailure::Late(limit), None);
            }
            LineEvent::Capped(next, AfterCap::Retry) => {
                self.open.remove(&next.line.number);
                match next.losses >= MOST_LOSSES {
                    true => self.fail(&next, LineFailure::WorkersLost, None),
                    false => self.retry(now(), next),
                }
            }
        }
    }

    fn ran(&mut self, mut next: NextTry, outcome: TryOutcome) {
        match outcome {
            TryOutcome::HeldBack { reason } => {
                self.open.remove(&next.line.number);
                self.hold_back(reason);
                self.retry(now() + HELD_BACK_WAIT, next);
            }
            TryOutcome::Answered(answer) => self.answered(&next, answer),
            TryOutcome::NotPlaced(waiting) | TryOutcome::RefusedByWorker(waiting) => {
                self.open.remove(&next.line.number);
                if waiting.holds_batch {
                    self.pause(&waiting);
                }
                self.retry(now() + waiting.retry_after.clamp(WAITS.0, WAITS.1), next);
            }
            // Admission has seen the id, so this try can never be placed.
            TryOutcome::IdKnown => {
                self.open.remove(&next.line.number);
                self.retry(now() + WAITS.0, next);
            }
            TryOutcome::Lost => {
                next.losses += 1;
                if next.losses == LOSSES_BEFORE_ALONE {
                    tracing::warn!(batch = %self.claim.batch, line = next.line.number, "a line lost two workers; it runs without other lines beside it");
                }
                self.settle(next, AfterCap::Retry);
            }
            // The dispatcher cancels lines of a batch that ends only. Here the service has
            // ended the try: because of its caller, or for a reason that passes.
            TryOutcome::Cancelled { is_paid, usage } => match self.gone() {
                Some(reason) if is_paid => {
                    self.keep_cancelled(&next, usage, Cause::Cancelled(reason));
                }
                _ => self.settle(next, AfterCap::Retry),
            },
        }
    }

    /// Acts on a try that took too long.
    fn ran_late(&mut self, next: NextTry, outcome: Option<TryOutcome>) {
        let limit = self.context.options.line;
        match outcome {
            Some(TryOutcome::Cancelled { is_paid, usage }) => {
                self.open.remove(&next.line.number);
                self.fail(&next, LineFailure::Late(limit), is_paid.then_some(usage));
            }
            Some(TryOutcome::Lost) | None => self.settle(next, AfterCap::FailLate),
            // The try ended by itself before the cancel reached it, so its outcome counts.
            Some(outcome) => self.ran(next, outcome),
        }
    }

    /// Waits for the cap of a line's last try.
    fn settle(&mut self, next: NextTry, after: AfterCap) {
        // Cloned: the try stays open until the ledger has the cap, so that a run that stops now
        // leaves it to the next claim.
        let cap = self.open.get(&next.line.number).cloned();
        let service = self.context.service.clone();
        self.events.push(Box::pin(async move {
            if let Some(cap) = cap {
                try_run::cap(&*service, cap).await;
            }
            LineEvent::Capped(next, after)
        }));
    }

    fn retry(&mut self, due: Instant, next: NextTry) {
        // A new number makes a new request id. The old one may have a cap of zero in the ledger.
        self.lines.retry(due, NextTry { number: next.number.saturating_add(1), ..next });
    }

    /// Keeps the answer of a line for the next write.
    pub(in crate::dispatch) fn answered(&mut self, next: &NextTry, answer: LineAnswer) {
        let LineAnswer { status, body, is_paid, usage, model } = answer;
        self.open.remove(&next.line.number);
        let request = self.claim.request_id(next.line.number, next.number);
        let bytes = answer_line(&next.line.custom_id, &request, (status, &body));
        let answer = NewAnswer {
            line: next.line.number,
            outcome: if status == 200 { LineOutcome::Completed } else { LineOutcome::Refused },
            bytes,
            paid: is_paid.then(|| self.claim.try_name(next.line.number, next.number)),
            usage,
            model,
            room: room(&next.line),
        };
        self.keep(answer);
    }

    /// Keeps an answer for the next write.
    pub(in crate::dispatch) fn keep(&mut self, answer: NewAnswer) {
        self.answered.insert(answer.line);
        self.answers.push(now(), answer);
    }

    /// Answers a line with a failure of this program. The try is paid with `paid`.
    fn fail(&mut self, next: &NextTry, failure: LineFailure, paid: Option<TryUsage>) {
        let reply = self.context.service.failure(failure);
        let is_paid = paid.is_some();
        let answer = LineAnswer {
            status: reply.status,
            body: reply.body,
            is_paid,
            usage: paid.unwrap_or_default(),
            // The model of a batch is that of its answers; a failure that nobody pays for is none.
            model: next.line.model.clone().filter(|_| is_paid),
        };
        self.answered(next, answer);
    }
}

/// Returns the bytes that are reserved for the answer of a line that was begun.
pub(in crate::dispatch) fn room(line: &Line) -> u64 {
    line.room.saturating_add(ROOM_OF_A_LINE)
}
