//! All that dreamc says: one writer for standard output, one for standard error.
//!
//! *In*: text, and how loud and colourful the user wants it. *Out*: the two streams. *Promise*: a
//! stream that is closed, full or read by nobody ends no work and causes no panic. A reader of
//! standard output that goes away loses the rest and nothing else happens; any other fault of
//! standard output is kept until the end of the command, which then fails with it. Faults of
//! standard error have nowhere to go.

use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsRawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// How dreamc speaks.
#[derive(Clone, Copy, Debug)]
pub struct Terminal {
    /// Colours and live lines.
    pub color: Color,
    /// Results and errors alone: no header, progress, notes or warnings.
    pub quiet: bool,
    /// Every step and every checkpoint on a line of its own.
    pub verbose: bool,
}

/// When there are colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Color {
    /// On a terminal that has them (heeds NO_COLOR, CLICOLOR, CLICOLOR_FORCE and TERM=dumb).
    Auto,
    /// Everywhere.
    Always,
    /// Nowhere.
    Never,
}

static TERMINAL: OnceLock<Terminal> = OnceLock::new();

/// The number of a rank that is not the first, whose results and notes are those of the first.
static RANK: OnceLock<u64> = OnceLock::new();

/// From now on this process is one of several that would say the same: it reports its failure
/// alone, with its number.
pub fn follow(rank: u64) {
    let _ = RANK.set(rank);
}

/// From now on dreamc speaks so.
pub fn speak(terminal: Terminal) {
    let _ = TERMINAL.set(terminal);
}

/// Whether results and errors are all that is wanted.
pub fn quiet() -> bool {
    RANK.get().is_some() || TERMINAL.get().is_some_and(|t| t.quiet)
}

/// Whether every step is wanted.
pub fn verbose() -> bool {
    TERMINAL.get().is_some_and(|t| t.verbose)
}

/// One of the two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output: what was asked for.
    Out,
    /// Standard error: errors, warnings, progress.
    Err,
}

impl Stream {
    /// Whether a person sees it.
    pub fn is_terminal(self) -> bool {
        match self {
            Stream::Out => io::stdout().is_terminal(),
            Stream::Err => io::stderr().is_terminal(),
        }
    }

    /// Whether it is a terminal whose cursor moves.
    pub fn is_live(self) -> bool {
        self.is_terminal() && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
    }

    /// Whether it has colours.
    pub fn has_color(self) -> bool {
        match TERMINAL.get().map_or(Color::Auto, |t| t.color) {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => wanted(|name| std::env::var(name).ok(), self.is_live()),
        }
    }

    /// Columns and rows of its terminal.
    pub fn size(self) -> (usize, usize) {
        let file = match self {
            Stream::Out => io::stdout().as_raw_fd(),
            Stream::Err => io::stderr().as_raw_fd(),
        };
        // SAFETY: the call writes a `winsize` into the one given, which is zeroed, a valid value of
        // it.
        let size = unsafe {
            let mut size: libc::winsize = std::mem::zeroed();
            (libc::ioctl(file, libc::TIOCGWINSZ, &mut size) == 0).then_some(size)
        };
        match size {
            Some(s) if s.ws_col > 0 && s.ws_row > 0 => (usize::from(s.ws_col), usize::from(s.ws_row)),
            _ => (80, 24),
        }
    }
}

/// The wish of the environment, as no-color.org and bixense.com/clicolors say.
fn wanted(variable: impl Fn(&str) -> Option<String>, live: bool) -> bool {
    let set = |name: &str| variable(name).filter(|v| !v.is_empty());
    match (set("NO_COLOR"), set("CLICOLOR_FORCE"), set("CLICOLOR")) {
        (Some(_), _, _) => false,
        (None, Some(force), _) if force != "0" => true,
        (None, _, Some(color)) if color == "0" => false,
        _ => live,
    }
}

/// Whether the reader of standard output went away.
static GONE: AtomicBool = AtomicBool::new(false);

/// Whether the reader of standard output went away, so that nothing more need be written for it.
pub fn unread() -> bool {
    GONE.load(Ordering::Relaxed)
}

/// A reader that went away is no fault of the command.
fn heard(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {
            GONE.store(true, Ordering::Relaxed);
            Ok(())
        }
        Err(error) => Err(io::Error::new(error.kind(), format!("standard output: {error}"))),
        Ok(()) => Ok(()),
    }
}

/// Writes to standard output.
pub fn write(text: &[u8]) -> io::Result<()> {
    if unread() || RANK.get().is_some() {
        return Ok(());
    }
    heard(io::stdout().lock().write_all(text))
}

/// Hands what was written to standard output to its reader.
pub fn flush() -> io::Result<()> {
    if unread() {
        return Ok(());
    }
    heard(io::stdout().lock().flush())
}

/// Writes to standard error, if that is possible.
pub fn complain(text: &str) {
    let rank = RANK.get().map_or(String::new(), |rank| format!("rank {rank}: "));
    let _ = io::stderr().lock().write_all(format!("{rank}{text}").as_bytes());
}

/// Writes a line to standard output.
#[macro_export]
macro_rules! say {
    () => {
        $crate::output::write(b"\n")
    };
    ($($argument:tt)*) => {
        $crate::output::write(format!("{}\n", format_args!($($argument)*)).as_bytes())
    };
}

/// Writes a line to standard error, unless quiet is wanted.
#[macro_export]
macro_rules! note {
    ($($argument:tt)*) => {
        if !$crate::output::quiet() {
            $crate::output::complain(&format!("{}\n", format_args!($($argument)*)));
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_heeded() {
        let asked = |set: &[(&str, &str)], live| {
            wanted(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()), live)
        };
        assert!(asked(&[], true) && !asked(&[], false));
        assert!(!asked(&[("NO_COLOR", "1")], true) && asked(&[("NO_COLOR", "")], true));
        assert!(!asked(&[("CLICOLOR", "0")], true) && asked(&[("CLICOLOR", "1")], true));
        assert!(asked(&[("CLICOLOR_FORCE", "1")], false) && !asked(&[("CLICOLOR_FORCE", "0")], false));
        assert!(!asked(&[("NO_COLOR", "1"), ("CLICOLOR_FORCE", "1")], true));
    }
}
