//! The rows that figures are reported in (schema: one JSON object per line).

use serde::Serialize;

use super::stats::Summary;

/// Which way a target is to be met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cmp {
    /// At most the target.
    Le,
    /// At least the target.
    Ge,
}

/// Which figure of a row its target is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TargetOn {
    /// Value divided by baseline.
    Ratio,
    /// The value itself, in the row's unit.
    Value,
}

/// A limit set for a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Target {
    on: TargetOn,
    cmp: Cmp,
    limit: f64,
}

impl Target {
    /// Value / baseline must not exceed `limit`.
    pub fn ratio_at_most(limit: f64) -> Self {
        Self {
            on: TargetOn::Ratio,
            cmp: Cmp::Le,
            limit,
        }
    }

    /// Value / baseline must reach `limit`.
    pub fn ratio_at_least(limit: f64) -> Self {
        Self {
            on: TargetOn::Ratio,
            cmp: Cmp::Ge,
            limit,
        }
    }

    /// The value must not exceed `limit`.
    pub fn at_most(limit: f64) -> Self {
        Self {
            on: TargetOn::Value,
            cmp: Cmp::Le,
            limit,
        }
    }
}

/// One figure. Fields that don't apply are null.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// Command and what the tool was compiled for, such as `peers/plain`; the report sets it.
    pub suite: String,
    /// Case, variant, size and contestant, separated by slashes.
    pub row: String,
    /// Unit of `value` and `baseline`.
    pub unit: String,
    /// The figure: a median, unless the row's name says otherwise.
    pub value: f64,
    /// The same figure of what it is compared with, from the same run.
    pub baseline: Option<f64>,
    /// What it is compared with.
    pub baseline_name: Option<String>,
    /// `value / baseline`.
    pub ratio: Option<f64>,
    /// Limit set for `target_on`.
    pub target: Option<f64>,
    /// What the limit is on.
    pub target_on: Option<TargetOn>,
    /// Which side of the limit is good.
    pub cmp: Option<Cmp>,
    /// Whether the target is met.
    pub holds: Option<bool>,
    /// Samples behind `value`.
    pub samples: u64,
    /// Interquartile range of the samples in percent of the median.
    pub spread: f64,
}

impl Row {
    /// A row without baseline or target.
    pub fn new(name: impl Into<String>, unit: &str, summary: Summary) -> Self {
        Self {
            suite: String::new(),
            row: name.into(),
            unit: unit.to_owned(),
            value: round(summary.median),
            baseline: None,
            baseline_name: None,
            ratio: None,
            target: None,
            target_on: None,
            cmp: None,
            holds: None,
            samples: summary.samples,
            spread: round(summary.spread),
        }
    }

    /// Adds what the figure is compared with.
    #[must_use]
    pub fn beside(mut self, name: &str, baseline: f64) -> Self {
        self.baseline = Some(round(baseline));
        self.baseline_name = Some(name.to_owned());
        self.ratio = (baseline > 0.0).then(|| round(self.value / baseline));
        self
    }

    /// Sets a target and says whether it is met. A ratio that couldn't be formed doesn't meet one.
    #[must_use]
    pub fn target(mut self, target: Option<Target>) -> Self {
        let Some(Target { on, cmp, limit }) = target else {
            return self;
        };
        let figure = match on {
            TargetOn::Value => Some(self.value),
            TargetOn::Ratio => self.ratio,
        };
        self.target = Some(limit);
        self.target_on = Some(on);
        self.cmp = Some(cmp);
        self.holds = Some(figure.is_some_and(|figure| match cmp {
            Cmp::Le => figure <= limit,
            Cmp::Ge => figure >= limit,
        }));
        self
    }
}

/// Three decimals: finer than any figure is repeatable.
fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(value: f64) -> Row {
        Row::new(
            "case/x",
            "ns",
            Summary {
                median: value,
                spread: 1.0,
                samples: 3,
            },
        )
    }

    #[test]
    fn json_has_exactly_the_fields_of_the_schema_in_order() {
        let row = row(2.0).beside("b", 4.0);
        let row = Row {
            suite: "peers/plain".to_owned(),
            ..row.target(Some(Target::ratio_at_most(0.6)))
        };
        let json = serde_json::to_string(&row).expect("rows are plain data");
        let want = r#"{"suite":"peers/plain","row":"case/x","unit":"ns","value":2.0,"baseline":4.0,"baseline_name":"b","ratio":0.5,"target":0.6,"target_on":"ratio","cmp":"le","holds":true,"samples":3,"spread":1.0}"#;
        assert_eq!(json, want);
    }

    #[test]
    fn no_target_leaves_its_four_fields_null() {
        let row = row(1.0).target(None);
        assert!(
            row.target.is_none()
                && row.target_on.is_none()
                && row.cmp.is_none()
                && row.holds.is_none()
        );
    }

    #[test]
    fn target_is_missed_just_above_the_limit() {
        assert_eq!(
            row(500.0).target(Some(Target::at_most(500.0))).holds,
            Some(true)
        );
        assert_eq!(
            row(500.001).target(Some(Target::at_most(500.0))).holds,
            Some(false)
        );
    }

    #[test]
    fn what_is_to_be_reached_holds_from_the_limit_on() {
        for (value, holds) in [(1000.0, true), (1001.0, true), (999.0, false)] {
            let row = row(value).beside("b", 1.0);
            let row = row.target(Some(Target::ratio_at_least(1000.0)));
            assert_eq!((row.holds, row.cmp), (Some(holds), Some(Cmp::Ge)));
        }
    }

    #[test]
    fn ratio_without_baseline_does_not_hold() {
        assert_eq!(
            row(1.0).target(Some(Target::ratio_at_most(2.0))).holds,
            Some(false)
        );
    }
}
