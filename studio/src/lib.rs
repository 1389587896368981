//! A page on this machine on which specifications are written and seen.
//!
//! *In*: a [`Folder`], [`Tools`] that know the language, a listener on a loopback address. *Out*: a
//! page over HTTP until `stop` says so. *Promise*: a request is answered where it has the token of
//! the address, and comes from no other origin; no file outside the folder is read or written; a
//! file that changed since it was read is not written over; the page asks nothing of another
//! machine.
//!
//! [`files`] is the folder, `http` connections and routes, `page/` the page: `studio.mjs` is its
//! source, `bundle.js` the source with its libraries, which `npm ci && npm run build` there writes.

pub mod files;
mod http;

pub use files::Folder;

use serde_json::Value;
use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

/// Questions of the page to the rest of dreamc.
pub trait Tools: Send + Sync + 'static {
    /// Answers a message of the Language Server Protocol about the document of one tab, whose file
    /// is `path`.
    fn language(&self, tab: &str, path: &Path, message: &Value) -> Vec<Value>;

    /// The drawing and the counts of a text, with times on a device of that name; nothing where
    /// the text has errors.
    fn view(&self, path: &Path, text: &str, device: Option<&str>) -> Option<View>;

    /// Names of the devices that times are predicted for.
    fn devices(&self) -> Vec<String>;

    /// The drawing of the formulas of a component that a definition makes.
    fn inside(&self, path: &Path, text: &str, component: &str) -> Option<String>;

    /// Sizes at which a text costs what the baseline does, and the text with them; a sentence
    /// where there are none. Nothing is written.
    fn matched(&self, own: (&Path, &str), baseline: (&Path, &str)) -> Result<Match, String>;

    /// The runs below a folder, those that train first; each an object with `path` (relative to the
    /// folder), `model`, `status`, `steps`, `tokens`, `loss` (held out, or null) and `trains`.
    fn runs(&self, root: &Path) -> Vec<Value>;

    /// The account that training a file would begin with: its time and memory; or why it would not
    /// begin.
    fn plan(&self, root: &Path, path: &Path) -> Result<String, String>;

    /// Begins to train a file, in a process that outlives the studio.
    fn start(&self, root: &Path, path: &Path) -> Result<(), String>;

    /// Asks the process that trains in a folder to write a checkpoint and end.
    fn stop(&self, run: &Path) -> Result<(), String>;

    /// Goes on with a run that was stopped, in a process that outlives the studio.
    fn resume(&self, root: &Path, run: &Path) -> Result<(), String>;

    /// The answer to a question, as a terminal shows it; or why there is none.
    fn tell(&self, root: &Path, question: Question) -> Result<String, String>;

    /// The last lines that a process begun here said, where one ended with an error.
    fn said(&self) -> Option<String>;
}

/// Sizes that meet a baseline.
pub struct Match {
    /// The fields and their new values.
    pub fields: Value,
    /// Relative differences that are left, by measure.
    pub residual: Value,
    /// The text with the values.
    pub text: String,
}

/// The view of a specification.
pub struct View {
    /// Its drawing.
    pub svg: String,
    /// Everything that is counted, as `dreamc count --json` prints it.
    pub counts: Value,
    /// Components that a definition makes, whose formulas can be drawn.
    pub defined: Vec<String>,
}

/// A question about runs that a command answers in words.
pub enum Question<'a> {
    /// How a run stands: speed, balance, losses.
    Run(&'a Path),
    /// Every field and result in which two runs differ.
    Difference(&'a Path, &'a Path),
    /// The text that a run's model writes after a prompt.
    Continuation(&'a Path, &'a str),
}

/// Everything that requests read.
struct Studio {
    folder: Folder,
    first: Option<String>,
    token: String,
    /// The authority of the server's own address, as `Host` has it.
    hosts: Vec<String>,
    tools: Box<dyn Tools>,
}

/// Serves until `stop`, which is asked several times a second. `first` is the file that the page
/// opens.
pub fn serve(
    folder: Folder,
    first: Option<String>,
    token: String,
    tools: Box<dyn Tools>,
    listener: TcpListener,
    stop: &dyn Fn() -> bool,
) -> io::Result<()> {
    let port = listener.local_addr()?.port();
    let hosts = ["127.0.0.1", "localhost", "[::1]"].map(|name| format!("{name}:{port}")).to_vec();
    let studio = Arc::new(Studio { folder, first, token, hosts, tools });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(4)
        .build()?;
    runtime.block_on(http::listen(listener, studio, stop))
}
