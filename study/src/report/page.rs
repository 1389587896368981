//! A report as one HTML page and as Markdown.
//!
//! *In*: a [`Page`]: headings, text, tables, figures. *Out*: `report.html`, which needs nothing
//! else (its one script shows values below the pointer, and says nothing that the page lacks), and
//! `report.md` with its figures in `figures/`. *Promise*: both say the same, and all text that
//! comes from elsewhere is escaped.

use super::plot::escape;
use dreamc_data::files;
use std::fmt::Write;
use std::io;
use std::path::Path;

const COLORS: &str = include_str!("style.css");
const LAYOUT: &str = include_str!("page.css");
const PLOTS: &str = include_str!("svg.css");
const SCRIPT: &str = include_str!("page.js");

/// A report.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// Its title.
    pub title: String,
    /// Its content, in order.
    pub blocks: Vec<Block>,
}

/// A piece of a report. In text, what stands between backticks is code.
#[derive(Clone, Debug)]
pub enum Block {
    /// A heading.
    Heading(String),
    /// A paragraph.
    Text(String),
    /// A remark on what stands above.
    Note(String),
    /// Items.
    List(Vec<String>),
    /// A table.
    Table(Table),
    /// Texts side by side, each with its name; lines that the first lacks are set off.
    Side(Vec<(String, String)>),
    /// Figures side by side where there is room.
    Figures(Vec<Figure>),
}

/// A table; the first column is to the left, the others to the right unless they are text.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Caption.
    pub caption: String,
    /// Names of columns.
    pub head: Vec<String>,
    /// Rows.
    pub rows: Vec<Vec<Cell>>,
    /// Numbers of columns that hold text.
    pub text: Vec<usize>,
}

/// A cell.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// Its text.
    pub text: String,
    /// Its place among its like.
    pub rank: Rank,
}

/// Place among others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rank {
    /// None in particular.
    #[default]
    Plain,
    /// The best.
    Best,
    /// The second best.
    Second,
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Cell { text: text.into(), rank: Rank::Plain }
    }
}

/// A picture.
#[derive(Clone, Debug)]
pub struct Figure {
    /// Name of its file, without ending.
    pub name: String,
    /// The SVG.
    pub svg: String,
    /// Description of the figure.
    pub caption: String,
    /// Whether it takes the whole width.
    pub full: bool,
}

impl Page {
    /// Adds a block.
    pub fn add(&mut self, block: Block) {
        self.blocks.push(block);
    }

    /// Adds a heading.
    pub fn heading(&mut self, text: &str) {
        self.add(Block::Heading(text.into()));
    }

    /// Adds a paragraph.
    pub fn text(&mut self, text: impl Into<String>) {
        self.add(Block::Text(text.into()));
    }

    /// Adds a remark.
    pub fn note(&mut self, text: impl Into<String>) {
        self.add(Block::Note(text.into()));
    }

    /// The page.
    pub fn html(&self) -> String {
        let title = escape(&self.title);
        let mut out = format!(
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>{title}</title>\n\
             <style>\n{COLORS}{LAYOUT}{PLOTS}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        );
        for block in &self.blocks {
            match block {
                Block::Heading(text) => {
                    let _ = writeln!(out, "<h2>{}</h2>", inline(text));
                }
                Block::Text(text) => {
                    let _ = writeln!(out, "<p>{}</p>", inline(text));
                }
                Block::Note(text) => {
                    let _ = writeln!(out, "<p class=\"note\">{}</p>", inline(text));
                }
                Block::List(items) => {
                    let items: String = items.iter().map(|i| format!("<li>{}</li>\n", inline(i))).collect();
                    let _ = write!(out, "<ul>\n{items}</ul>\n");
                }
                Block::Side(texts) => {
                    out += "<div class=\"side\">\n";
                    for (name, text) in texts {
                        let lines = text.lines().map(|line| {
                            let known = texts.first().is_some_and(|(_, t)| t.lines().any(|l| l == line));
                            let line = escape(line);
                            if known { format!("{line}\n") } else { format!("<mark>{line}</mark>\n") }
                        });
                        let lines: String = lines.collect();
                        let _ = writeln!(
                            out,
                            "<figure>\n<figcaption>{}</figcaption>\n<pre>{lines}</pre>\n</figure>",
                            inline(name)
                        );
                    }
                    out += "</div>\n";
                }
                Block::Table(table) => out += &table.html(),
                Block::Figures(figures) => {
                    out += "<div class=\"figures\">\n";
                    for f in figures {
                        let class = match (f.full, figures.len()) {
                            (true, _) => " class=\"full\"",
                            (false, 1) => " class=\"alone\"",
                            _ => "",
                        };
                        let _ = writeln!(
                            out,
                            "<figure{class}>\n<div class=\"picture\">\n{}</div>\n<figcaption>{}</figcaption>\n</figure>",
                            f.svg,
                            inline(&f.caption)
                        );
                    }
                    out += "</div>\n";
                }
            }
        }
        if out.contains(" data-points=") {
            let _ = writeln!(out, "<script>\n{SCRIPT}</script>");
        }
        out + "</body>\n</html>\n"
    }

    /// The same as Markdown; figures are files.
    pub fn markdown(&self) -> String {
        let mut out = format!("# {}\n", marked(&self.title));
        for block in &self.blocks {
            out.push('\n');
            match block {
                Block::Heading(text) => {
                    let _ = writeln!(out, "## {}", marked(text));
                }
                Block::Text(text) | Block::Note(text) => {
                    let _ = writeln!(out, "{}", marked(text));
                }
                Block::List(items) => items.iter().for_each(|i| {
                    let _ = writeln!(out, "- {}", marked(i));
                }),
                Block::Side(texts) => {
                    for (i, (name, text)) in texts.iter().enumerate() {
                        let gap = if i > 0 { "\n" } else { "" };
                        let fence = "`".repeat(3 + if text.contains("```") { text.len() } else { 0 });
                        let text = text.trim_end();
                        let _ = writeln!(out, "{gap}{}\n\n{fence}\n{text}\n{fence}", marked(name));
                    }
                }
                Block::Table(table) => out += &table.markdown(),
                Block::Figures(figures) => {
                    for f in figures {
                        let _ = writeln!(
                            out,
                            "![{}](figures/{}.svg)\n\n{}\n",
                            f.caption.replace(['[', ']', '<', '>', '`'], ""),
                            f.name,
                            marked(&f.caption)
                        );
                    }
                    out.truncate(out.trim_end().len() + 1);
                }
            }
        }
        out
    }

    /// Writes `{name}.html`, `{name}.md` and `figures/` into a folder.
    pub fn write(&self, folder: &Path, name: &str) -> io::Result<()> {
        let put = |path: &Path, text: &str| files::write_atomic(path, |out| out.write_all(text.as_bytes()));
        let figures = folder.join("figures");
        std::fs::create_dir_all(&figures).map_err(|e| files::about(&figures, e))?;
        for block in &self.blocks {
            let Block::Figures(list) = block else { continue };
            for f in list {
                put(&figures.join(format!("{}.svg", f.name)), &alone(&f.svg))?;
            }
        }
        put(&folder.join(format!("{name}.md")), &self.markdown())?;
        put(&folder.join(format!("{name}.html")), &self.html())
    }
}

/// A picture as a file of its own, which brings its colours.
pub fn alone(svg: &str) -> String {
    let style = format!("<style>\n{COLORS}svg {{ background: var(--paper); }}\n{PLOTS}</style>\n");
    let at = svg.find('\n').map_or(0, |i| i + 1);
    format!("{}{style}{}", &svg[..at], &svg[at..])
}

impl Table {
    fn html(&self) -> String {
        let class = |c: usize, rank: Rank| {
            let mut classes = vec![];
            if self.text.contains(&c) {
                classes.push("text");
            }
            match rank {
                Rank::Best => classes.push("best"),
                Rank::Second => classes.push("second"),
                Rank::Plain => {}
            }
            if classes.is_empty() { String::new() } else { format!(" class=\"{}\"", classes.join(" ")) }
        };
        let mut out = String::from("<div class=\"wide\"><table>\n");
        if !self.caption.is_empty() {
            let _ = writeln!(out, "<caption>{}</caption>", inline(&self.caption));
        }
        out += "<thead><tr>";
        for (c, name) in self.head.iter().enumerate() {
            let _ = write!(out, "<th{}>{}</th>", class(c, Rank::Plain), inline(name));
        }
        out += "</tr></thead>\n<tbody>\n";
        for row in &self.rows {
            out += "<tr>";
            for (c, cell) in row.iter().enumerate() {
                let _ = write!(out, "<td{}>{}</td>", class(c, cell.rank), inline(&cell.text));
            }
            out += "</tr>\n";
        }
        out + "</tbody></table></div>\n"
    }

    fn markdown(&self) -> String {
        let mut out = String::new();
        if !self.caption.is_empty() {
            let _ = writeln!(out, "{}\n", marked(&self.caption));
        }
        let _ = writeln!(out, "| {} |", self.head.iter().map(|h| bars(h)).collect::<Vec<_>>().join(" | "));
        let rules =
            (0..self.head.len()).map(|c| if c == 0 || self.text.contains(&c) { "---" } else { "---:" });
        let _ = writeln!(out, "|{}|", rules.collect::<Vec<_>>().join("|"));
        for row in &self.rows {
            let cells = row.iter().map(|cell| {
                let text = bars(&cell.text);
                match cell.rank {
                    Rank::Best => format!("**{text}**"),
                    Rank::Second => format!("_{text}_"),
                    Rank::Plain => text,
                }
            });
            let _ = writeln!(out, "| {} |", cells.collect::<Vec<_>>().join(" | "));
        }
        out
    }
}

/// Text of a cell of a Markdown table.
fn bars(text: &str) -> String {
    marked(text).replace('|', "\\|")
}

/// Text of Markdown, in which nothing from elsewhere is a tag, a link or a new paragraph. Code
/// between backticks stays code.
fn marked(text: &str) -> String {
    let text = text.replace(['\n', '\r'], " ");
    let pieces: Vec<&str> = text.split('`').collect();
    let plain = |p: &str| {
        let p = p.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        p.replace('[', "\\[").replace(']', "\\]")
    };
    if pieces.len().is_multiple_of(2) {
        return plain(&text).replace('`', "\\`");
    }
    let piece = |(i, p): (usize, &&str)| if i % 2 == 1 { format!("`{p}`") } else { plain(p) };
    pieces.iter().enumerate().map(piece).collect()
}

/// Escaped text with `code` between backticks.
fn inline(text: &str) -> String {
    let pieces: Vec<&str> = text.split('`').collect();
    if pieces.len().is_multiple_of(2) {
        return escape(text);
    }
    let piece =
        |(i, p): (usize, &&str)| if i % 2 == 1 { format!("<code>{}</code>", escape(p)) } else { escape(p) };
    pieces.iter().enumerate().map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_escaped() {
        assert_eq!(inline("a `<b>` & c"), "a <code>&lt;b&gt;</code> &amp; c");
        assert_eq!(inline("one ` alone"), "one ` alone");
        let table = Table { head: vec!["a|b".into()], rows: vec![vec!["<x>".into()]], ..Table::default() };
        assert!(table.html().contains("&lt;x&gt;") && table.markdown().contains("&lt;x&gt;"));
        let mut page = Page { title: "<script>alert(1)</script>".into(), ..Page::default() };
        page.text("a [link](javascript:x) ` <b>\n\n# no heading");
        page.add(Block::Side(vec![("`a`".into(), "x\n<i>".into()), ("`b`".into(), "x\ny".into())]));
        let text = page.markdown();
        assert!(!text.contains("<script") && !text.contains("<b>") && !text.contains("\n# no"), "{text}");
        assert!(text.contains("\\[link\\](javascript") && text.contains("\\`"), "{text}");
        let html = page.html();
        assert!(html.contains("&lt;i&gt;") && html.contains("x\n<mark>y</mark>"), "{html}");
        assert!(table.markdown().contains("a\\|b"));
    }
}
