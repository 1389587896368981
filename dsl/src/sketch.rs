//! A model as its author would write it: `.dream`, with all that is as it would be anyway left out.
//!
//! *In*: a checked specification. *Out*: a short text. *Promise*: it reads back as the same model.
//! Nothing is known here of defaults: a key is left out where the checker gives the same model
//! without it.

use crate::ast::{Ast, FileKind, Layer, LayerKind, Map, Spelling, Value, ValueKind};
use crate::check::Checker;
use crate::source::SourceMap;
use crate::spec::Spec;
use crate::{format, run, show};

/// More sections than people write are shown in full: each key costs a look at the whole model.
const MOST_SECTIONS: usize = 256;

/// The text.
pub(crate) fn sketch(spec: &Spec) -> String {
    let mut root = show::tree(spec);
    root.items.retain(|item| matches!(item.node.key.text.as_str(), "define" | "model"));
    if count(&mut root) <= MOST_SECTIONS {
        for place in 0..root.items.len() {
            reduce(&mut root, &mut vec![(place, 0)], &|root| model(root).is_some_and(|m| m == spec.model));
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

/// Takes away every key below the section at `path` without which the tree is worth the same.
fn reduce(root: &mut Map, path: &mut Vec<(usize, usize)>, same: &dyn Fn(&Map) -> bool) {
    let Some(count) = at(root, path).map(|map| map.items.len()) else { return };
    for index in (0..count).rev() {
        let Some(item) = at(root, path).map(|map| map.items.remove(index)) else { return };
        if same(root) {
            continue;
        }
        let mut below = 0;
        if let Some(map) = at(root, path) {
            map.items.insert(index, item);
            below = sections(&mut map.items[index].node.value).len();
        }
        for section in 0..below {
            path.push((index, section));
            reduce(root, path, same);
            path.pop();
        }
    }
}

/// The section at the end of a path: numbers of items, and of sections in their values.
fn at<'a>(root: &'a mut Map, path: &[(usize, usize)]) -> Option<&'a mut Map> {
    let mut map = root;
    for &(index, section) in path {
        let found = sections(&mut map.items.get_mut(index)?.node.value);
        map = found.into_iter().nth(section)?;
    }
    Some(map)
}

/// The outermost sections of a value: its own, those of its elements, and the keys of the wrappers
/// of a layer.
fn sections(value: &mut Value) -> Vec<&mut Map> {
    match &mut value.kind {
        ValueKind::Map(map) => vec![map],
        ValueKind::List(list) => list.items.iter_mut().flat_map(|item| sections(&mut item.node)).collect(),
        ValueKind::Layer(layer) => wrappers(layer),
        ValueKind::Null
        | ValueKind::Bool(_)
        | ValueKind::Word(_)
        | ValueKind::Text(_)
        | ValueKind::Number(_)
        | ValueKind::Invalid => vec![],
    }
}

fn wrappers(layer: &mut Layer) -> Vec<&mut Map> {
    match &mut layer.kind {
        LayerKind::Sequential(all) | LayerKind::Parallel(all) => all.iter_mut().flat_map(wrappers).collect(),
        LayerKind::Group(inner) => wrappers(inner),
        LayerKind::Skip(keys, inner) => std::iter::once(keys).chain(wrappers(inner)).collect(),
        LayerKind::Component(_) | LayerKind::Statement(_) | LayerKind::Invalid => vec![],
    }
}

/// How many sections there are in all.
fn count(map: &mut Map) -> usize {
    let below = map.items.iter_mut().flat_map(|item| sections(&mut item.node.value));
    1 + below.map(count).sum::<usize>()
}
