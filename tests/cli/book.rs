//! The book: its specifications are right, its commands run, its outputs are captured.
//!
//! `BLESS=1 cargo test --test cli book::` runs the tutorial as it is printed (minutes) and writes
//! what came out into it. Without it the tutorial is run with short trainings, and outputs in
//! which no time or measurement stands are compared.

use crate::support::root;
use crate::support::sandbox::{Sandbox, texts};
use dreamc_dsl::Spelling;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// A fenced block of a page.
pub struct Block {
    pub language: String,
    pub text: String,
    /// The line after its fence.
    pub line: usize,
}

/// Blocks of a page, in order.
pub fn blocks(page: &str) -> Vec<Block> {
    let mut all: Vec<Block> = vec![];
    let mut open: Option<Block> = None;
    for (number, line) in page.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(_), Some(_)) => all.extend(open.take()),
            (Some(language), None) => {
                open = Some(Block { language: language.into(), text: String::new(), line: number + 2 });
            }
            (None, Some(block)) => {
                block.text += line;
                block.text += "\n";
            }
            (None, None) => {}
        }
    }
    all
}

fn page(name: &str) -> String {
    fs::read_to_string(root(&format!("docs/{name}"))).unwrap()
}

/// Pages of the book by their paths in `docs`, as its table of contents has them.
fn pages() -> Vec<String> {
    let summary = page("SUMMARY.md");
    let names = summary.lines().filter_map(|line| line.split_once("](")?.1.strip_suffix(')'));
    names.map(str::to_string).collect()
}

/// Files of a folder, by their paths in it.
fn files(folder: &Path, under: &str) -> Vec<String> {
    let entries = fs::read_dir(folder.join(under)).unwrap().map(|entry| entry.unwrap());
    let inside = entries.flat_map(|entry| {
        let name = format!("{under}{}", entry.file_name().to_str().unwrap());
        match entry.file_type().unwrap().is_dir() {
            true => files(folder, &format!("{name}/")),
            false => vec![name],
        }
    });
    inside.collect()
}

/// Values of an attribute in a page of HTML.
fn attributes<'a>(html: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let (name, text) = (format!(" {name}=\""), html);
    let begins: Vec<usize> = text.match_indices(&name).map(|(i, _)| i + name.len()).collect();
    begins.into_iter().filter_map(move |i| text[i..].split('"').next())
}

/// The book as mdBook makes it; it stays in the build folder, to be looked at.
#[test]
fn every_link_of_the_built_book_leads_somewhere() {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("book");
    let mut book = mdbook_driver::MDBook::load(root("")).unwrap();
    book.config.build.build_dir = out.clone();
    book.build().unwrap();
    let html: Vec<String> = files(&out, "").into_iter().filter(|name| name.ends_with(".html")).collect();
    assert!(html.len() > pages().len(), "{html:?}");
    let mut dead = vec![];
    for name in &html {
        let text = fs::read_to_string(out.join(name)).unwrap();
        let folder = out.join(name).parent().unwrap().to_path_buf();
        for link in attributes(&text, "href").chain(attributes(&text, "src")) {
            // Addresses of the web are not asked for; 404.html has paths from the root of a site.
            if link.contains(':') || link.starts_with('/') || name == "404.html" {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let to = if path.is_empty() { out.join(name) } else { folder.join(path) };
            let there = match fs::read_to_string(&to) {
                Ok(page) => anchor.is_empty() || attributes(&page, "id").any(|id| id == anchor),
                // Pictures and letters are bytes.
                Err(_) => anchor.is_empty() && to.is_file(),
            };
            if !there {
                dead.push(format!("{name}: {link}"));
            }
        }
    }
    assert!(dead.is_empty(), "dead links:\n{}", dead.join("\n"));
}

#[test]
fn every_specification_of_the_book_is_right() {
    let mut count = 0;
    for name in pages() {
        for block in blocks(&page(&name)) {
            let spelling = match block.language.as_str() {
                "dream" => Spelling::Dream,
                "yaml" => Spelling::Yaml,
                _ => continue,
            };
            let at = format!("docs/{name}:{}", block.line);
            // Parts of files are shown, too: those must parse, the others be right.
            let ast = dreamc_dsl::parse(&at, &block.text, spelling).unwrap_or_else(|e| panic!("{e}"));
            let whole = ast.root.get("model").is_some_and(|model| model.value.as_map().is_some());
            if whole && ast.root.get("base").is_none() {
                let (_, warnings) = dreamc_dsl::check(&ast, &[]).unwrap_or_else(|e| panic!("{at}\n{e}"));
                assert!(warnings.is_empty(), "{at}: {warnings:?}");
                count += 1;
            } else if ast.kind == dreamc_dsl::FileKind::Suite {
                dreamc_dsl::check_suite(&ast, &[]).unwrap_or_else(|e| panic!("{at}\n{e}"));
                count += 1;
            }
        }
    }
    assert!(count >= 18, "{count} specifications");
}

#[test]
fn every_command_of_the_page_exists() {
    let sandbox = Sandbox::with(&[]);
    let text = page("commands.md");
    let named = text.split("`dreamc ").skip(1).filter_map(|rest| rest.split([' ', '`']).next());
    let named: Vec<&str> = named.filter(|name| *name != "COMMAND").collect();
    assert!(named.len() > 25, "{named:?}");
    for name in named {
        assert!(sandbox.good(&[name, "--help"]).contains("Usage: dreamc"), "{name}");
    }
}

/// The tutorial by its own text alone.
#[test]
fn the_tutorial_runs_as_it_is_printed() {
    runs_as_printed("tutorial.md");
}

#[test]
fn the_page_of_a_mixer_runs_as_it_is_printed() {
    runs_as_printed("mixer.md");
}

#[test]
fn the_page_of_probes_runs_as_it_is_printed() {
    runs_as_printed("probe.md");
}

#[test]
fn the_page_of_transplants_runs_as_it_is_printed() {
    runs_as_printed("transplant.md");
}

#[test]
fn the_page_of_llama_cpp_runs_as_it_is_printed() {
    runs_as_printed("gguf.md");
}

fn runs_as_printed(name: &str) {
    let bless = std::env::var_os("BLESS").is_some();
    let sandbox = Sandbox::with(&[]);
    symlink(root("docs"), sandbox.path("docs")).unwrap();
    let bin = Path::new(env!("CARGO_BIN_EXE_dreamc")).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let text = page(name);
    let found = blocks(&text);
    let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
    let (mut written, mut times) = (vec![], String::new());
    for (i, block) in found.iter().enumerate().filter(|(_, block)| block.language == "sh") {
        let script = match bless {
            true => block.text.clone(),
            false => short(&block.text),
        };
        let mut command = Command::new("bash");
        command.args(["-c", &format!("set -e -o pipefail; {{ {script} }} 2>&1")]);
        command.current_dir(sandbox.path("")).env("PATH", &path).env("DREAMC_CACHE", sandbox.path("cache"));
        let begun = Instant::now();
        let output = command.stdin(std::process::Stdio::null()).output().unwrap();
        let (out, _) = texts(&output);
        let last = block.text.lines().rfind(|line| line.starts_with("dreamc ")).unwrap_or_default();
        times += &format!("{:7.1} s  {last}\n", begun.elapsed().as_secs_f64());
        assert!(output.status.success(), "docs/{name}:{}\n{script}\n{out}", block.line);
        let Some(shown) = found.get(i + 1).filter(|next| next.language == "text") else { continue };
        if bless {
            written.push((shown.line, shown.text.lines().count(), tidy(&sandbox, &out)));
        } else if !["train", "tokenizer", "generate", "analyze", "compare", "watch", "verify"]
            .iter()
            .any(|c| block.text.contains(&format!("dreamc {c} ")))
        {
            assert_eq!(tidy(&sandbox, &out), shown.text, "docs/{name}:{}", shown.line);
        }
    }
    println!("{times}");
    for (line, count, out) in written.into_iter().rev() {
        lines.splice(line - 1..line - 1 + count, out.lines().map(str::to_string));
    }
    if bless {
        fs::write(root(&format!("docs/{name}")), lines.join("\n") + "\n").unwrap();
    }
}

/// A script with trainings of two steps.
fn short(script: &str) -> String {
    let set = "--set train.steps=2 --set train.warmup=1 --set train.evaluate.every=0";
    let lines = script.lines().map(|line| match line {
        _ if line.starts_with("dreamc train ") => format!("{line} {set}"),
        _ if line.starts_with("dreamc compare ") && !line.contains("--dry-run") => {
            format!("{line} --dry-run")
        }
        _ => line.to_string(),
    });
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

/// Output without the paths of this machine.
fn tidy(sandbox: &Sandbox, out: &str) -> String {
    let here = sandbox.path("").display().to_string();
    out.replace(here.trim_end_matches('/'), ".").lines().map(|l| format!("{}\n", l.trim_end())).collect()
}

/// The figure that leads the README is of a comparison that five seeds decide, and its sentence is
/// that of the page with the result.
#[test]
fn the_first_figure_is_of_five_seeds() {
    let readme = fs::read_to_string(root("README.md")).unwrap();
    let figure = readme.split("](").nth(1).and_then(|rest| rest.split(')').next()).unwrap();
    let folder = figure.strip_prefix("docs/results/").and_then(|rest| rest.split('/').next()).unwrap();
    let result = page(&format!("results/{folder}.md"));
    assert!(result.contains("five seeds") && result.contains(&figure["docs/results/".len()..]), "{folder}");
    let said = readme.split(figure).nth(1).and_then(|rest| rest.split("## ").next()).unwrap();
    let shown: Vec<&str> = said.split("p = ").skip(1).map(|rest| rest.split(')').next().unwrap()).collect();
    assert!(!shown.is_empty());
    for p in shown {
        assert!(result.contains(&format!("*p* = {p})")), "{p}");
    }
}
