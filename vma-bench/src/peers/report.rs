//! Where rows go: JSON lines at once, or tables for people and a list of what was to be reached.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use super::row::{Cmp, Row, TargetOn};
use crate::report::json_line;

/// Collects rows; in JSON mode each is printed when it's known.
#[derive(Debug, Default)]
pub struct Report {
    /// The command.
    suite: &'static str,
    json: bool,
    cells: Vec<Cell>,
    broken_pipe: Option<io::Error>,
}

/// A row and its place in the tables.
#[derive(Debug)]
struct Cell {
    section: String,
    line: String,
    column: String,
    row: Row,
}

impl Report {
    /// An empty report.
    pub fn new(suite: &'static str, json: bool) -> Self {
        Self {
            suite,
            json,
            ..Self::default()
        }
    }

    /// Adds the figure of `line` in `column` of the table `section`; the three make the row's name. Of several figures
    /// for one place (one for each baseline) the table shows the first.
    pub fn add(
        &mut self,
        section: &str,
        column: &str,
        line: &str,
        make: impl FnOnce(String) -> Row,
    ) {
        let row = Row {
            suite: format!("{}/{}", self.suite, super::build_kind()),
            ..make(format!("{section}/{column}/{line}"))
        };
        if self.json
            && let Err(error) = json_line(&row)
        {
            self.broken_pipe.get_or_insert(error);
        }
        self.cells.push(Cell {
            section: section.to_owned(),
            line: line.to_owned(),
            column: column.to_owned(),
            row,
        });
    }

    /// Prints what hasn't been printed yet.
    ///
    /// # Errors
    /// What writing to standard output gave, now or earlier.
    pub fn finish(self) -> io::Result<()> {
        if let Some(error) = self.broken_pipe {
            return Err(error);
        }
        let verdict = self.verdict();
        if self.json {
            return writeln!(io::stderr().lock(), "{verdict}");
        }
        let mut out = io::stdout().lock();
        for section in distinct(self.cells.iter().map(|cell| cell.section.as_str())) {
            out.write_all(self.table(section).as_bytes())?;
        }
        out.write_all(self.targets().as_bytes())?;
        writeln!(out, "{verdict}")
    }

    /// One section: contestants down, sizes across.
    fn table(&self, section: &str) -> String {
        let cells = || self.cells.iter().filter(|cell| cell.section == section);
        let columns = distinct(cells().map(|cell| cell.column.as_str()));
        let lines = distinct(cells().map(|cell| cell.line.as_str()));
        let unit = cells().next().map_or("", |cell| cell.row.unit.as_str());
        let width = lines
            .iter()
            .map(|line| line.len())
            .max()
            .unwrap_or(0)
            .max(section.len());
        let mut text = format!(
            "\n{section:width$}  [{unit}, median and quartile spread]\n{:width$}",
            ""
        );
        for column in &columns {
            let _ = write!(text, "  {column:>16}");
        }
        for line in lines {
            let _ = write!(text, "\n{line:width$}");
            for column in &columns {
                let cell = cells().find(|cell| cell.line == line && cell.column == *column);
                let shown = cell.map_or_else(String::new, |cell| figure(&cell.row));
                let _ = write!(text, "  {shown:>16}");
            }
        }
        text.push('\n');
        text
    }

    /// Every row that has a target, misses first.
    fn targets(&self) -> String {
        let mut rows: Vec<&Row> = self.rows_with_target().collect();
        rows.sort_by_key(|row| row.holds);
        let mut text = String::from("\ntargets\n");
        for row in rows {
            let verdict = if row.holds == Some(true) {
                "holds"
            } else {
                "MISSES"
            };
            let (shown, unit) = match row.target_on {
                Some(TargetOn::Ratio) => (row.ratio, "x"),
                _ => (Some(row.value), row.unit.as_str()),
            };
            let shown = shown.map_or_else(|| String::from("?"), |shown| format!("{shown:.2}"));
            let target = row.target.unwrap_or_default();
            let sign = if row.cmp == Some(Cmp::Ge) { ">=" } else { "<=" };
            let baseline = row.baseline_name.as_deref().unwrap_or("");
            let beside = if row.target_on == Some(TargetOn::Ratio) {
                baseline
            } else {
                ""
            };
            let _ = writeln!(
                text,
                "{verdict:6}  {shown:>8} {sign} {target} {unit} {beside:24}  {}",
                row.row
            );
        }
        text
    }

    fn rows_with_target(&self) -> impl Iterator<Item = &Row> {
        self.cells
            .iter()
            .map(|cell| &cell.row)
            .filter(|row| row.target.is_some())
    }

    fn verdict(&self) -> String {
        let total = self.rows_with_target().count();
        let held = self
            .rows_with_target()
            .filter(|row| row.holds == Some(true))
            .count();
        format!(
            "{} build: {held} of {total} targets hold, {} missed",
            super::build_kind(),
            total - held
        )
    }
}

fn figure(row: &Row) -> String {
    let value = match row.value {
        // A ratio: what matters is near 1.
        value if row.unit == "x" => format!("{value:.3}"),
        value if value < 100.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    };
    if row.samples > 1 && row.spread > 0.0 {
        format!("{value} ±{:>2.0}%", row.spread)
    } else {
        value
    }
}

/// Each once, in order of first appearance.
fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    for name in names {
        if !seen.contains(&name) {
            seen.push(name);
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::super::row::Target;
    use super::super::stats::Summary;
    use super::*;

    fn sample() -> Report {
        let mut report = Report::default();
        let summary = Summary {
            median: 12.0,
            spread: 3.0,
            samples: 9,
        };
        for (column, limit) in [("1k", 20.0), ("10k", 10.0)] {
            report.add("case", column, "tree", |name| {
                Row::new(name, "ns", summary)
                    .beside("map", 24.0)
                    .target(Some(Target::at_most(limit)))
            });
            report.add("case", column, "map", |name| Row::new(name, "ns", summary));
        }
        report
    }

    #[test]
    fn a_table_has_a_line_per_contestant_and_a_column_per_size() {
        let table = sample().table("case");
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 5, "{table}");
        assert!(lines[2].contains("1k") && lines[2].contains("10k"));
        assert_eq!(lines[3].matches("12.0").count(), 2);
    }

    #[test]
    fn misses_come_first_and_are_counted() {
        let report = sample();
        assert!(
            report
                .targets()
                .lines()
                .nth(2)
                .is_some_and(|line| line.starts_with("MISSES"))
        );
        assert!(report.verdict().ends_with("1 of 2 targets hold, 1 missed"));
    }
}
