//! Templates of Python: files that are Python themselves, with marks after some of their lines.
//!
//! *In*: a template and the parts that a model has. *Out*: its lines without those of parts that
//! the model lacks. A line that ends in `#? a&!b|c` stays where (`a` holds and `b` does not) or `c`
//! holds; a line that is such a mark and nothing else is an empty one.

use std::collections::BTreeSet;

/// The parts that a model has.
pub type Parts = BTreeSet<&'static str>;

/// A template with its marks decided.
pub fn expand(template: &str, parts: &Parts) -> String {
    let mut text = String::new();
    for line in template.lines() {
        let (line, mark) = match line.rsplit_once("#? ") {
            Some((line, mark)) => (line.trim_end(), mark),
            None => (line, ""),
        };
        if mark.is_empty() || mark.split('|').any(|all| all.split('&').all(|one| holds(one, parts))) {
            text += line;
            text.push('\n');
        }
    }
    text
}

fn holds(mark: &str, parts: &Parts) -> bool {
    match mark.strip_prefix('!') {
        Some(part) => !parts.contains(part),
        None => parts.contains(mark),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_where_their_parts_are() {
        let parts = Parts::from(["a", "c"]);
        let text = "x\ny  #? a\nz  #? !a\nu  #? a&b\nv  #? b|c\n#? a\nw  #? a&!b\n";
        assert_eq!(expand(text, &parts), "x\ny\nv\n\nw\n");
    }
}
