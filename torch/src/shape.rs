//! Named dimensions as places of Python's: broadcasting, products, changes of shape.

use crate::tree::Expr;
use dreamc_compiler::ir::{Dim, Module};

/// Whether a size follows that of the batch: `batch`, `seq`, or a number of tokens or slots.
pub type Varies<'a> = &'a dyn Fn(Dim) -> bool;

/// `x` of dimensions `from`, to broadcast against a value of dimensions `to`.
pub fn aligned(x: Expr, from: &[Dim], to: &[Dim]) -> Expr {
    let mut order: Vec<usize> = (0..from.len()).collect();
    order.sort_by_key(|&k| to.iter().position(|d| *d == from[k]));
    let sorted = order.iter().enumerate().all(|(i, &k)| i == k);
    let x = if sorted { x } else { permuted(x, &order) };
    let first = to.iter().position(|d| from.contains(d)).unwrap_or(to.len());
    let tail = &to[first..];
    let own = |d: &Dim| from.contains(d);
    if tail.iter().all(own) {
        return x;
    }
    // Dimensions of one at the end alone.
    let missing = tail.iter().rev().take_while(|d| !own(d)).count();
    if tail[..tail.len() - missing].iter().all(own) {
        return x.index(format!("...{}", ", None".repeat(missing)));
    }
    let places: Vec<&str> = tail.iter().map(|d| if own(d) { ":" } else { "None" }).collect();
    x.index(places.join(", "))
}

/// `x.permute(…)`, or `x.transpose(…)` of two.
pub fn permuted(x: Expr, order: &[usize]) -> Expr {
    let moved: Vec<usize> = (0..order.len()).filter(|&i| order[i] != i).collect();
    if let [a, b] = moved[..] {
        return x.method("transpose", vec![integer(a as i64), integer(b as i64)]);
    }
    x.method("permute", order.iter().map(|&k| integer(k as i64)).collect())
}

/// An integer.
pub fn integer(n: i64) -> Expr {
    Expr::name(n.to_string())
}

/// The sum over `over` of a product; dimensions in both and not in `over` go along.
pub fn product(a: (Expr, &[Dim]), b: (Expr, &[Dim]), over: &[Dim], result: &[Dim], module: &Module) -> Expr {
    let (rows, last) = (a.1.len().saturating_sub(1), a.1.last());
    let plain = over.len() == 1 && b.1.len() == 2 && last == over.first() && b.1.last() == over.first();
    if plain && result.len() == a.1.len() && result[..rows] == a.1[..rows] && result.last() == b.1.first() {
        return Expr::call("F.linear", vec![a.0, b.0]);
    }
    let letters = letters(&[a.1, b.1].concat(), module);
    let of = |dims: &[Dim]| -> String {
        dims.iter().filter_map(|d| letters.iter().find(|(e, _)| e == d)).map(|(_, c)| *c).collect()
    };
    let form = format!("\"{},{}->{}\"", of(a.1), of(b.1), of(result));
    Expr::call("torch.einsum", vec![Expr::name(form), a.0, b.0])
}

/// A letter for each dimension: its own first letter where nobody has it.
fn letters(dims: &[Dim], module: &Module) -> Vec<(Dim, char)> {
    let mut found: Vec<(Dim, char)> = vec![];
    for &dim in dims {
        if found.iter().any(|(d, _)| *d == dim) {
            continue;
        }
        let name = short(module.name(dim));
        let own = match name.as_str() {
            "seq" => 't',
            name => name.chars().find(char::is_ascii_lowercase).unwrap_or('i'),
        };
        let free = |c: &char| found.iter().all(|(_, taken)| taken != c);
        let letter = std::iter::once(own).chain('i'..='z').chain('a'..='h').find(free).unwrap_or('A');
        found.push((dim, letter));
    }
    found
}

/// The name of a dimension inside its component.
pub fn short(name: &str) -> String {
    let name = name.trim_end_matches(|c: char| c.is_ascii_digit());
    name.rsplit_once("..").or_else(|| name.split_once('.')).map_or(name, |(_, own)| own).to_string()
}

/// Dimensions as a comment lists them.
pub fn listed(dims: &[Dim], module: &Module) -> String {
    let names: Vec<String> = dims.iter().map(|d| short(module.name(*d))).collect();
    names.join(", ")
}

/// `(4, 16)`
pub fn tuple(dims: &[Dim], module: &Module) -> String {
    let sizes: Vec<String> = dims.iter().map(|d| module.size(*d).to_string()).collect();
    match &sizes[..] {
        [one] => format!("({one},)"),
        sizes => format!("({})", sizes.join(", ")),
    }
}

/// The elements of `x` in other dimensions. `x` is an atom where [`needs_name`] says so.
pub fn reshaped(x: Expr, from: &[Dim], to: &[Dim], module: &Module, varies: Varies) -> Expr {
    let head = from.iter().zip(to).take_while(|(a, b)| a == b).count();
    let rest = |n: usize| from[head..].iter().rev().zip(to[head..].iter().rev()).take(n).all(|(a, b)| a == b);
    let most = from.len().min(to.len()) - head;
    let tail = (0..=most).rev().find(|&n| rest(n)).unwrap_or(0);
    let (a, b) = (&from[head..from.len() - tail], &to[head..to.len() - tail]);
    let at = -(tail as i64) - 1;
    let fixed = |dims: &[Dim]| !dims.iter().any(|&d| varies(d));
    match (a, b) {
        ([], []) => x,
        ([one], [other]) if module.size(*one) == module.size(*other) => x,
        ([one], []) if module.size(*one) == 1 => x.method("squeeze", vec![integer(at)]),
        ([], [one]) if module.size(*one) == 1 => x.method("unsqueeze", vec![integer(at)]),
        ([_], many) if many.len() > 1 && fixed(many) => {
            x.method("unflatten", vec![integer(at), Expr::name(tuple(many, module))])
        }
        (many, [_]) if many.len() > 1 => {
            let first = integer(at + 1 - many.len() as i64);
            x.method("flatten", if tail == 0 { vec![first] } else { vec![first, integer(at)] })
        }
        _ => {
            let whole = to.iter().filter(|&&d| varies(d) && !from.contains(&d)).count();
            let size = |d: &Dim| match from.iter().position(|e| e == d) {
                Some(k) if varies(*d) => Expr::name(format!("{}.shape[{k}]", x.text())),
                _ if varies(*d) && whole == 1 => integer(-1),
                _ => integer(module.size(*d) as i64),
            };
            let sizes = to.iter().map(size).collect();
            x.method("reshape", sizes)
        }
    }
}

/// Zeros of a shape, with the device and type of `like`; `size` gives the text of a size.
pub fn zeros(like: &str, dims: &[Dim], size: &dyn Fn(Dim) -> String) -> Expr {
    let sizes: Vec<String> = dims.iter().map(|d| size(*d)).collect();
    let shape = if sizes.len() == 1 { format!("({},)", sizes[0]) } else { format!("({})", sizes.join(", ")) };
    Expr::name(like).method("new_zeros", vec![Expr::name(shape)])
}
