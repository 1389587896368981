//! A model as its author would write it: `.dream`, with all that is as it would be anyway left out.
//!
//! *In*: a checked specification. *Out*: a short text. *Promise*: it reads back as the same model.
//! Nothing is known here of defaults: a key is left out where the checker gives the same model
//! without it.

use crate::ast::{Ast, FileKind, Map, Spelling, ValueKind};
use crate::check::Checker;
use crate::source::SourceMap;
use crate::spec::Spec;
use crate::{format, run, show};

/// More components than people write are shown in full: each key costs a look at the whole model.
const MOST_COMPONENTS: usize = 64;

/// The text.
pub(crate) fn sketch(spec: &Spec) -> String {
    let mut root = show::tree(spec);
    root.items.retain(|item| matches!(item.node.key.text.as_str(), "define" | "model"));
    if spec.model.components.len() <= MOST_COMPONENTS {
        for place in 0..root.items.len() {
            reduce(&mut root, &mut vec![place], &|root| model(root).is_some_and(|m| m == spec.model));
        }
    }
    // A definition of the library needs none.
    root.items.retain(|item| item.node.value.as_map().is_none_or(|map| !map.items.is_empty()));
    format::print(&root, Spelling::Dream)
}

fn model(root: &Map) -> Option<crate::spec::Model> {
    let source = SourceMap::new("", "");
    let ast =
        Ast { source, spelling: Spelling::Yaml, kind: FileKind::Spec, root: root.clone(), errors: vec![] };
    run(&ast, FileKind::Spec, &[], Checker::spec).ok().map(|(spec, _)| spec.model)
}

/// Takes away every key below the one at `path` without which the tree is worth the same.
fn reduce(root: &mut Map, path: &mut Vec<usize>, same: &dyn Fn(&Map) -> bool) {
    let Some(count) = at(root, path).map(|map| map.items.len()) else { return };
    for index in (0..count).rev() {
        let Some(item) = at(root, path).map(|map| map.items.remove(index)) else { return };
        if same(root) {
            continue;
        }
        if let Some(map) = at(root, path) {
            map.items.insert(index, item);
        }
        path.push(index);
        reduce(root, path, same);
        path.pop();
    }
}

/// The map at the end of a path of numbers of items.
fn at<'a>(root: &'a mut Map, path: &[usize]) -> Option<&'a mut Map> {
    let mut map = root;
    for &index in path {
        let ValueKind::Map(inner) = &mut map.items.get_mut(index)?.node.value.kind else { return None };
        map = inner;
    }
    Some(map)
}
