//! Lines that a person is to read although nothing failed.
//!
//! *In*: a line. *Out*: standard error, or where a front end takes them. *Promise*: nothing else of
//! this crate writes to the terminal.

use std::sync::OnceLock;

static LISTENER: OnceLock<fn(&str)> = OnceLock::new();

/// From now on notices go here.
pub fn listen(listener: fn(&str)) {
    let _ = LISTENER.set(listener);
}

/// Says a line.
pub(crate) fn notice(line: &str) {
    match LISTENER.get() {
        Some(listener) => listener(line),
        None => eprintln!("{line}"),
    }
}
