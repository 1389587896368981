//! Overlays: a specification that says how it differs from another.
//!
//! `base` names the folder of a run or of an imported model, or a specification. That is put under
//! the file's: `model`, `train` and `eval` are merged key by key, components by name; everything
//! else, lists and layers included, is replaced as a whole. For a folder, `weights` takes the place
//! of `base`, so that what is loaded says where training begins and needs the overlay no more, and
//! data without a `tokenizer` have the folder's.

use crate::ast::{Ast, FileKind, Item, Key, Map, Pair, Value, ValueKind};
use crate::diagnostic::{Diagnostic, Diagnostics};
use std::path::Path;

/// The limit of overlays below one another.
const DEEPEST: usize = 8;

/// The sections that are merged, `define` by names; of the others the file's own stands.
const MERGED: [&str; 4] = ["define", "model", "train", "eval"];

/// The tree of a file in `folder` with that of its base below it, `depth` overlays deep.
pub(crate) fn resolve(mut ast: Ast, folder: &Path, depth: usize) -> Result<Ast, Diagnostics> {
    let Some(at) = ast.root.items.iter().position(|item| item.node.key.text == "base") else {
        return Ok(ast);
    };
    let value = &ast.root.items[at].node.value;
    let (ValueKind::Word(name) | ValueKind::Text(name)) = &value.kind else { return Ok(ast) };
    if ast.kind != FileKind::Spec {
        return Ok(ast);
    }
    let (name, span) = (name.clone(), value.span);
    let refuse = |ast: Ast, message: String, help: &str| {
        Err(Diagnostics::new(ast.source, vec![Diagnostic::error("bad-base", message).on(span).help(help)]))
    };
    let named = folder.join(&name);
    let file = if named.is_dir() { named.join("spec.yaml") } else { named.clone() };
    if !file.is_file() {
        let message = match named.is_dir() {
            true => format!("`{}` is not the folder of a model: it has no spec.yaml", named.display()),
            false => format!("there is no `{}`", named.display()),
        };
        return refuse(ast, message, "name the folder of a run or of an imported model, or a specification");
    }
    if depth >= DEEPEST {
        return refuse(
            ast,
            format!("more than {DEEPEST} bases stand below one another"),
            "does one name itself?",
        );
    }
    let (mut spec, _) = crate::load_below(&file, &[], depth + 1)?;
    // Paths relative to the base's folder become relative to this one.
    if let Some(inner) = file.strip_prefix(folder).ok().and_then(Path::parent) {
        spec.paths().for_each(|path| *path = inner.join(&*path).to_string_lossy().into_owned());
    }
    // The weights of a run need no transplant and no teacher any more.
    if named.join("checkpoints").is_dir() || over_weights(&ast) {
        (spec.transplant, spec.heal) = (None, None);
    }
    let mut under = crate::show::tree(&spec);
    // Its tokens stand in no file that this one's diagnostics could show.
    under.place(span);
    let mut over = std::mem::take(&mut ast.root);
    let item = over.items.remove(at);
    if named.is_dir() && over.get("weights").is_none() {
        let key = Key { text: "weights".into(), span: item.node.key.span };
        over.items.insert(
            0,
            Item::new(Pair { key, value: Value::new(crate::grammar::text_kind(name.clone()), span) }),
        );
    }
    let tokenizer = Path::new(&name).join("tokenizer.json");
    if folder.join(&tokenizer).is_file()
        && let Some(data) = over.items.iter_mut().find(|item| item.node.key.text == "data")
        && let ValueKind::Map(data) = &mut data.node.value.kind
        && data.get("tokenizer").is_none()
    {
        let kind = ValueKind::Text(tokenizer.to_string_lossy().into_owned());
        let key = Key { text: "tokenizer".into(), span };
        data.items.push(Item::new(Pair { key, value: Value::new(kind, span) }));
    }
    merge(&mut under, over, "");
    ast.root = under;
    Ok(ast)
}

/// Whether a file names weights of its own to begin from.
fn over_weights(ast: &Ast) -> bool {
    ast.root.get("weights").is_some()
}

/// Puts the pairs of `over` into `under`, a map at `place`.
fn merge(under: &mut Map, over: Map, place: &str) {
    let mut seen: Vec<String> = vec![];
    under.span = over.span;
    for item in over.items {
        let name = item.node.key.text.clone();
        let below = under.items.iter_mut().find(|below| below.node.key.text == name);
        // A key that is written twice stays twice, for the checker to say so.
        let (Some(below), false) = (below, seen.contains(&name)) else {
            under.items.push(item);
            continue;
        };
        seen.push(name.clone());
        below.node.key = item.node.key;
        let (value, place) = (item.node.value, format!("{place}.{name}"));
        match (&mut below.node.value.kind, value.kind) {
            (ValueKind::Map(low), ValueKind::Map(high)) if merges(&place, low, &high) => {
                below.node.value.span = value.span;
                merge(low, high, &place);
            }
            (_, kind) => below.node.value = Value::new(kind, value.span),
        }
    }
}

/// Whether two maps at a place are merged. A component of another kind is another component.
fn merges(place: &str, low: &Map, high: &Map) -> bool {
    let mut levels = place.split('.').skip(1);
    let section = levels.next().unwrap_or_default();
    let kind = |map: &Map| map.items.first().map(|item| item.node.key.text.clone());
    let component = section == "model" && levels.next() == Some("components") && levels.count() == 1;
    // A definition of the same name is another definition.
    let definition = section == "define" && place.split('.').count() > 2;
    MERGED.contains(&section) && !definition && (!component || kind(low) == kind(high))
}
