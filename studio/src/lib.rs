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
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Questions of the page to the rest of dreamc.
pub trait Tools: Send + Sync + 'static {
    /// Answers a message of the Language Server Protocol about the document of one tab, whose file
    /// is `path`.
    fn language(&self, tab: &str, path: &Path, message: &Value) -> Vec<Value>;

    /// The drawing and the counts of a text, with times on a device of that name; nothing where
    /// the text has errors.
    fn view(&self, path: &Path, text: &str, device: Option<&str>, loops: Loops) -> Option<View>;

    /// Names of the devices that times are predicted for.
    fn devices(&self) -> Vec<String>;

    /// The drawing of a component from inside.
    fn inside(&self, path: &Path, text: &str, component: &str) -> Option<String>;

    /// Sizes at which a text costs what the baseline does, and the text with them; a sentence
    /// where there are none. Nothing is written.
    fn matched(&self, own: (&Path, &str), baseline: (&Path, &str)) -> Result<Match, String>;

    /// The runs, comparisons, ladders and exams below a folder, those that train first; each an
    /// object with `path` (relative to the folder), `kind`, `status`, `trains` and `ended`; a run
    /// with `model`, `steps`, `tokens`, `flops` (of a trained token, or null) and `loss` (held out,
    /// or null).
    fn runs(&self, root: &Path) -> Vec<Value>;

    /// The account that a job would begin with: its time and memory; or why it would not begin.
    fn plan(&self, root: &Path, job: &Job) -> Result<String, String>;

    /// Begins a job, in a process that outlives the studio.
    fn start(&self, root: &Path, job: &Job) -> Result<(), String>;

    /// Asks the processes that train in a folder, or in those of its runs, to write checkpoints and
    /// end.
    fn stop(&self, run: &Path) -> Result<(), String>;

    /// Goes on with a run, a comparison or an exam that was stopped, in a process that outlives the
    /// studio.
    fn resume(&self, root: &Path, run: &Path) -> Result<(), String>;

    /// The answer to a question, as a terminal shows it; or why there is none.
    fn tell(&self, root: &Path, question: Question) -> Result<String, String>;

    /// The last lines that processes begun here wrote on their error streams.
    fn said(&self) -> Said;
}

/// How a loop is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loops {
    /// Once, with a line that leads back.
    Folded,
    /// Pass by pass.
    Unrolled,
}

/// Something that trains.
pub enum Job {
    /// A specification, or a suite.
    File(PathBuf),
    /// An exam of specifications.
    Exam(Exam),
}

/// An exam as it is asked for.
pub struct Exam {
    /// The specifications, the baseline first.
    pub specs: Vec<PathBuf>,
    /// Names of tasks between commas; those of every exam where it is empty.
    pub tasks: String,
    /// Time of all runs together, as `10m`.
    pub budget: String,
    /// Steps of every run, in place of those that the time allows.
    pub steps: Option<u64>,
    /// Seeds of every arm.
    pub seeds: u64,
}

/// Lines of error streams.
#[derive(Default)]
pub struct Said {
    /// Of the last process that ended with an error.
    pub failed: Option<String>,
    /// Of those that go on.
    pub notes: Option<String>,
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
    /// Its components, which can be drawn from inside.
    pub components: Vec<String>,
}

/// A question about runs that a command answers in words.
pub enum Question<'a> {
    /// How a run stands: speed, balance, losses.
    Run(&'a Path),
    /// Every field in which two runs or specifications differ, and of runs every result.
    Difference(&'a Path, &'a Path),
    /// A text as a run's model reads it, token by token, as JSON.
    Reading(&'a Path, &'a str),
    /// A run's model from inside, as a report next to the run.
    Analysis(&'a Path),
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
