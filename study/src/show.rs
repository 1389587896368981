//! Numbers, tables and JSON for people and programs.

use crate::output;
use std::io;

/// Writes a value as JSON.
pub fn json(value: &impl serde::Serialize) -> io::Result<()> {
    output::write(format!("{}\n", serde_json::to_string_pretty(value)?).as_bytes())
}

/// A number with three digits that matter and a unit: `1.23 M`.
pub fn short(n: f64) -> String {
    let (value, unit) = match n.abs() {
        x if x >= 1e12 => (n / 1e12, " T"),
        x if x >= 1e9 => (n / 1e9, " G"),
        x if x >= 1e6 => (n / 1e6, " M"),
        x if x >= 1e4 => (n / 1e3, " k"),
        x if x >= 100.0 || n.fract() == 0.0 => return format!("{n:.0}"),
        _ => return format!("{n:.1}"),
    };
    let digits = if value.abs() >= 100.0 {
        0
    } else if value.abs() >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.digits$}{unit}")
}

/// Bytes with a unit: `12.3 MiB`.
pub fn bytes(n: u64) -> String {
    let n = n as f64;
    match n {
        x if x >= 1024f64.powi(3) => format!("{:.2} GiB", n / 1024f64.powi(3)),
        x if x >= 1024f64.powi(2) => format!("{:.1} MiB", n / 1024f64.powi(2)),
        x if x >= 1024.0 => format!("{:.1} KiB", n / 1024.0),
        _ => format!("{n:.0} B"),
    }
}

/// A duration: `1 h 02 min`, `3 min 20 s`, `12 s`.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() {
        return "?".into();
    }
    let s = seconds.round() as u64;
    match s {
        _ if seconds < 9.95 => format!("{seconds:.1} s"),
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {:02} s", s / 60, s % 60),
        _ => format!("{} h {:02} min", s / 3600, s % 3600 / 60),
    }
}

/// Rows with columns aligned: the first to the left, the others to the right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cells: Vec<String> = row
            .iter()
            .enumerate()
            .map(|(c, s)| if c == 0 { format!("{s:<0$}", widths[c]) } else { format!("{s:>0$}", widths[c]) })
            .collect();
        out += &format!("  {}\n", cells.join("  ").trim_end());
    }
    out
}

/// A count of epochs.
pub fn times(epochs: f64) -> String {
    match epochs {
        ..0.01 => format!("{epochs:.1e}"),
        ..10.0 => format!("{epochs:.2}"),
        _ => format!("{epochs:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [0.0, 12.5, 8954.4, 12_345.0, 1.5e6, 2e9].map(short),
            ["0", "12.5", "8954", "12.3 k", "1.50 M", "2.00 G"]
        );
        assert_eq!([100, 2048, 5 << 20, 3 << 30].map(bytes), ["100 B", "2.0 KiB", "5.0 MiB", "3.00 GiB"]);
        assert_eq!([3.25, 12.0, 200.0, 3720.0].map(duration), ["3.2 s", "12 s", "3 min 20 s", "1 h 02 min"]);
    }
}
