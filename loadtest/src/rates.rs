//! The rate of a load over its time: constant, rising or falling, in steps, with or
//! without a spike.

use std::str::FromStr;

use crate::plan::{Arrivals, Random};

/// The requests a second over the time of a load.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// The rate without the spike.
    course: Course,
    spike: Option<Spike>,
}

#[derive(Clone, Debug, PartialEq)]
enum Course {
    /// From the first rate at the start evenly to the second one at the end.
    Ramp(f64, f64),
    /// One rate after the other, each for the same time.
    Steps(Vec<f64>),
}

/// A rate for a part of the time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spike {
    rate: f64,
    /// Seconds from the start of the load.
    begin: f64,
    end: f64,
}

/// A part of the time in which the rate changes evenly.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stretch {
    /// Seconds from the start of the load.
    begin: f64,
    end: f64,
    /// The rate at the begin and at the end.
    from: f64,
    to: f64,
}

impl Rates {
    /// Creates a constant rate.
    pub fn constant(rate: f64) -> Self {
        Self { course: Course::Steps(vec![rate]), spike: None }
    }

    /// Returns the same rates with a spike.
    pub fn with_spike(self, spike: Option<Spike>) -> Self {
        Self { spike, ..self }
    }

    /// Returns true if the rate is the same all the time.
    pub fn is_constant(&self) -> bool {
        self.spike.is_none() && matches!(&self.course, Course::Steps(steps) if steps.len() == 1)
    }

    /// Returns the mistake if a load of so many seconds cannot have these rates.
    pub(crate) fn mistake(&self, seconds: f64) -> Option<&'static str> {
        let rates: &[f64] = match &self.course {
            Course::Ramp(from, to) => &[*from, *to],
            Course::Steps(steps) => steps,
        };
        let mut rates = rates.iter().copied().chain(self.spike.map(|spike| spike.rate));
        if !rates.all(|rate| rate.is_finite() && rate >= 0.0) {
            return Some("a rate must be a number and at least 0");
        }
        if self.spike.is_some_and(|spike| spike.end > seconds) {
            return Some("the spike must end within the time of the load");
        }
        (self.count(seconds) <= 0.0).then_some("the rate must be above 0 for a part of the time")
    }

    /// Returns the number of requests that are expected within so many seconds.
    pub(crate) fn count(&self, seconds: f64) -> f64 {
        self.stretches(seconds).iter().map(Stretch::count).sum()
    }

    /// Returns the due time of each request, in seconds from the start.
    pub(crate) fn times(&self, seconds: f64, arrivals: Arrivals, random: &mut Random) -> Vec<f64> {
        let mut times = Vec::new();
        // Arrivals at one request a second, which each stretch compresses in time.
        let mut next = arrivals.gap(1.0, random);
        for stretch in self.stretches(seconds) {
            let count = stretch.count();
            while next < count {
                times.push(stretch.time_of(next));
                next += arrivals.gap(1.0, random);
            }
            next -= count;
        }
        times
    }

    /// Returns the stretches of a load of so many seconds, in their order.
    fn stretches(&self, seconds: f64) -> Vec<Stretch> {
        let base: Vec<Stretch> = match &self.course {
            Course::Ramp(from, to) => {
                vec![Stretch { begin: 0.0, end: seconds, from: *from, to: *to }]
            }
            Course::Steps(steps) => {
                let at = |number: usize| seconds * number as f64 / steps.len() as f64;
                let step = |(number, &rate)| Stretch {
                    begin: at(number),
                    end: at(number + 1),
                    from: rate,
                    to: rate,
                };
                steps.iter().enumerate().map(step).collect()
            }
        };
        let Some(Spike { rate, begin, end }) = self.spike else { return base };
        let before = base.iter().filter_map(|stretch| stretch.between(0.0, begin));
        let after = base.iter().filter_map(|stretch| stretch.between(end, seconds));
        before.chain([Stretch { begin, end, from: rate, to: rate }]).chain(after).collect()
    }
}

impl Stretch {
    fn count(&self) -> f64 {
        (self.from + self.to) / 2.0 * (self.end - self.begin)
    }

    /// Returns the time at which so many requests are due since the begin.
    fn time_of(&self, count: f64) -> f64 {
        // The count after x seconds is from * x + slope * x * x / 2; this solves it for x. The
        // form with the root in the divisor also holds for a slope of 0.
        let slope = (self.to - self.from) / (self.end - self.begin);
        let root = (self.from * self.from + 2.0 * slope * count).max(0.0).sqrt();
        let since = if count > 0.0 { 2.0 * count / (self.from + root) } else { 0.0 };
        (self.begin + since).min(self.end)
    }

    /// Returns the part between two times, unless it is empty.
    fn between(&self, begin: f64, end: f64) -> Option<Self> {
        let (begin, end) = (begin.max(self.begin), end.min(self.end));
        let slope = (self.to - self.from) / (self.end - self.begin);
        let rate = |time: f64| self.from + slope * (time - self.begin);
        (begin < end).then(|| Self { begin, end, from: rate(begin), to: rate(end) })
    }
}

impl FromStr for Rates {
    type Err = String;

    /// Parses `N`, `FROM..TO` or `N,N,...`.
    fn from_str(text: &str) -> Result<Self, String> {
        let course = match text.split_once("..") {
            Some((from, to)) => {
                number(from).zip(number(to)).map(|(from, to)| Course::Ramp(from, to))
            }
            None => text.split(',').map(number).collect::<Option<_>>().map(Course::Steps),
        };
        let course = course.ok_or(
            "must be a number of requests a second such as 5, a ramp such as 5..50, or steps \
             such as 5,20,50",
        )?;
        Ok(Self { course, spike: None })
    }
}

impl FromStr for Spike {
    type Err = String;

    /// Parses `RATE@AT+FOR`.
    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('@').and_then(|(rate, span)| {
            let (begin, lasts) = span.split_once('+')?;
            Some((number(rate)?, number(begin)?, number(lasts).filter(|&lasts| lasts > 0.0)?))
        });
        let (rate, begin, lasts) =
            parts.ok_or("must be RATE@AT+FOR: 50@10+3 is 50 requests/s from second 10 for 3 s")?;
        Ok(Self { rate, begin, end: begin + lasts })
    }
}

fn number(text: &str) -> Option<f64> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(text: &str) -> Rates {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// Returns the requests that are due in each second.
    fn due(rates: &Rates, seconds: usize, arrivals: Arrivals) -> Vec<usize> {
        let mut due = vec![0; seconds];
        let times = rates.times(seconds as f64, arrivals, &mut Random(1));
        assert!(times.is_sorted());
        times.iter().for_each(|&time| due[time as usize] += 1);
        due
    }

    #[test]
    fn uniform_rates_follow_their_course() {
        let near = |rates: &Rates, wanted: &[usize]| {
            let due = due(rates, wanted.len(), Arrivals::Uniform);
            // A request at the end of a second may fall into the next one.
            let fits = due.iter().zip(wanted).all(|(due, wanted)| due.abs_diff(*wanted) <= 1);
            assert!(fits, "{rates:?}: {due:?}");
        };
        near(&rates("100"), &[100, 100, 100]);
        near(&rates("0..100"), &[10, 30, 50, 70, 90]);
        near(&rates("100..0"), &[90, 70, 50, 30, 10]);
        near(&rates("10,0,50"), &[10, 10, 0, 0, 50, 50]);
        let spike = |text: &str| Some(text.parse::<Spike>().expect("valid"));
        near(&rates("10").with_spike(spike("80@1+2")), &[10, 80, 80, 10]);
        near(&rates("0..40").with_spike(spike("90@1+1")), &[5, 90, 25, 35]);
        near(&rates("10,20").with_spike(spike("0@1+2")), &[10, 0, 0, 20]);
    }

    #[test]
    fn random_arrivals_follow_their_course() {
        let due = due(&rates("0..2000"), 4, Arrivals::Poisson);
        for (due, wanted) in due.iter().zip([250usize, 750, 1_250, 1_750]) {
            // Five standard deviations of a Poisson count.
            let tolerated = 5.0 * (wanted as f64).sqrt();
            assert!(due.abs_diff(wanted) as f64 <= tolerated, "{due}, not {wanted}");
        }
    }

    #[test]
    fn rates_refuse_other_text() {
        for text in ["", "x", "5..", "5..6..7", "5,,6", "-1", "nan", "inf", "5@3+1"] {
            assert!(text.parse::<Rates>().is_err(), "{text}");
        }
        for text in ["", "50", "50@10", "50+3", "50@10+0", "50@-1+3", "x@1+1"] {
            assert!(text.parse::<Spike>().is_err(), "{text}");
        }
    }

    #[test]
    fn rates_without_requests_are_mistakes() {
        for text in ["0", "0,0", "0..0"] {
            assert!(rates(text).mistake(10.0).is_some_and(|why| why.contains("above 0")));
        }
        let spike: Spike = "5@8+3".parse().expect("valid");
        let late = rates("1").with_spike(Some(spike));
        assert!(late.mistake(10.0).is_some_and(|why| why.contains("the spike")));
        assert_eq!(late.mistake(11.0), None);
        assert_eq!(rates("0..5").mistake(10.0), None);
    }
}
