//! Functions that modules call, in Python: `python/helpers.py`; a module has those that it needs.

const SOURCE: &str = include_str!("../python/helpers.py");

/// Every helper with its name, in order.
fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    SOURCE.split("\n\n\n").map(|text| {
        let head = text.trim_start_matches("class ").trim_start_matches("def ");
        let end = head.find(['(', ':']).unwrap_or(head.len());
        (&head[..end], text.trim_end())
    })
}

/// Whether a module may have a helper of that name.
pub fn is_helper(name: &str) -> bool {
    all().any(|(helper, _)| helper == name)
}

/// Whether a text calls, or names, a function.
fn names(text: &str, name: &str) -> bool {
    text.match_indices(name).any(|(at, _)| {
        let word = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
        !text[..at].ends_with(word)
            && !text[at + name.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_')
    })
}

/// The helpers that a text calls, and those that these call. Its documentation calls nothing.
pub fn needed(text: &str) -> Vec<&'static str> {
    let code: String = text.split("\"\"\"").step_by(2).collect();
    let mut wanted: Vec<bool> = all().map(|(name, _)| names(&code, name)).collect();
    loop {
        let mut more = false;
        for (_, body) in all().zip(wanted.clone()).filter(|(_, wanted)| *wanted).map(|(helper, _)| helper) {
            for (i, (name, _)) in all().enumerate() {
                let called = names(body, name);
                more |= called && !wanted[i];
                wanted[i] |= called;
            }
        }
        if !more {
            return all().zip(wanted).filter(|(_, wanted)| *wanted).map(|((_, text), _)| text).collect();
        }
    }
}
