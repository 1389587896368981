//! `dreamc studio`: specifications are written and seen on a page.

use clap::Args;
use dreamc_runtime::train::signal;
use dreamc_studio::{Folder, serve};
use dreamc_study::failure::{Done, Failure};
use dreamc_study::{output, say};
use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

/// Write specifications and see them, on a page of this machine
#[derive(Args)]
#[command(after_help = "\
Examples:
  dreamc studio
  dreamc studio examples/quickstart.yaml
  dreamc studio examples --port 8750

The address that is printed has a token: whoever has it can read and write the specifications of the folder, and nobody else.
Ctrl-C ends the server; files are written when you save them.")]
pub struct Arguments {
    /// A folder with specifications, or one of them; the folder where you are by default
    #[arg(value_name = "FOLDER|SPEC", default_value = ".")]
    place: PathBuf,

    /// Port to listen at; 0 takes any that is free
    #[arg(long, default_value_t = 0, value_name = "N")]
    port: u16,
}

pub fn run(a: Arguments) -> Done {
    let (folder, first) = match a.place.is_file() {
        true => {
            let folder = a.place.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            (folder, a.place.file_name().map(|name| name.to_string_lossy().into_owned()))
        }
        false => (a.place.as_path(), None),
    };
    let named = |e: std::io::Error| Failure::Usage(format!("{}: {e}", a.place.display()));
    let folder = Folder::new(folder).map_err(named)?;
    if let Some(first) = &first {
        folder.place(first).map_err(|e| Failure::Usage(e.to_string()))?;
    }
    let address = (Ipv4Addr::LOCALHOST, a.port);
    let listener = TcpListener::bind(address)
        .map_err(|e| Failure::Usage(format!("cannot listen at 127.0.0.1:{}: {e}", a.port)))?;
    signal::catch();
    let token = token();
    say!("the studio of {} is at http://{}/?token={token}", folder.root().display(), listener.local_addr()?)?;
    output::flush()?;
    let tools = Box::new(crate::studio::Studio::default());
    Ok(serve(folder, first, token, tools, listener, &|| signal::caught().is_some())?)
}

/// 128 bits that nobody can guess: hashes under keys that the system drew.
fn token() -> String {
    (0..2).map(|n: u8| format!("{:016x}", RandomState::new().hash_one(n))).collect()
}
