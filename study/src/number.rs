//! Numbers to compare to the last digit that matters.

/// With thousands apart: `1,170,842,624`.
pub fn grouped(n: u128) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A number of things by the name of one: `1 step`, `1,500 steps`.
pub fn many(n: u128, one: &str) -> String {
    format!("{} {one}{}", grouped(n), if n == 1 { "" } else { "s" })
}

/// Four decimals and a unit, as papers print them: `1.1708 B`.
pub fn decimals(n: f64) -> String {
    let units = [(1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")];
    // A model of 0.9 B is compared with one of 1.1 B.
    match units.into_iter().find(|u| n.abs() >= u.0 / 10.0) {
        Some((unit, name)) => format!("{:.4} {name}", n / unit),
        None => format!("{n:.1}"),
    }
}

/// Bytes in decimal units, as makers of devices and papers count them: `2.375 GB`.
pub fn decimal_bytes(n: u128) -> String {
    let units = [(1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    match units.into_iter().find(|u| n as f64 >= u.0) {
        Some((unit, name)) => format!("{:.3} {name}", n as f64 / unit),
        None => format!("{n} B"),
    }
}

/// A short time: `1.234 ms`.
pub fn instant(seconds: f64) -> String {
    let units = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")];
    match units.into_iter().find(|u| seconds >= u.0) {
        Some((unit, name)) => format!("{:.3} {name}", seconds / unit),
        None => format!("{:.3} ns", seconds * 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn to_the_last_digit_that_matters() {
        assert_eq!([0, 999, 1000, 1_170_842_624].map(grouped), ["0", "999", "1,000", "1,170,842,624"]);
        assert_eq!([0, 1, 1500].map(|n| many(n, "step")), ["0 steps", "1 step", "1,500 steps"]);
        assert_eq!([1_170_842_624.0, 938_147_840.0, 12.0].map(decimals), ["1.1708 B", "0.9381 B", "12.0"]);
        assert_eq!([2_375_274_496, 12].map(decimal_bytes), ["2.375 GB", "12 B"]);
        assert_eq!([2.5, 0.000_71, 1e-9].map(instant), ["2.500 s", "710.000 µs", "1.000 ns"]);
    }
}
