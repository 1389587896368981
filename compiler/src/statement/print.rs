//! Statements as the text of a dialect.
//!
//! *In*: a [`Unit`]. *Out*: its entries, and what they call, in CUDA, HIP or Metal. *Promise*: all
//! dialects have the same statements in the same order; they differ in their words
//! (`kernels/words.cuh`, `kernels/words.metal`), in where an address points, and in how an entry
//! gets its arguments.

use super::{Entry, Expr, ExprKind, Function, Infix, Number, Prefix, Statement, Table, Type, Unit};
use std::collections::BTreeSet;
use std::fmt::Write;

/// A GPU language.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// CUDA C++, compiled by NVRTC.
    #[default]
    Cuda,
    /// HIP C++, compiled by hipRTC.
    Hip,
    /// The Metal shading language, compiled by the system.
    Metal,
    /// The statements as they are written, which the CPU runs.
    Plain,
}

impl Dialect {
    fn metal(self) -> bool {
        self == Dialect::Metal
    }
}

/// A text with all entries of a unit; its first line is `title`.
pub fn print(unit: &Unit, title: &str, dialect: Dialect) -> String {
    let mut printer = Printer { unit, dialect, out: String::new() };
    let _ = writeln!(printer.out, "// {title}");
    let of_blocks = unit.of_blocks();
    match (dialect, of_blocks) {
        (Dialect::Metal, _) => printer.out.push_str(include_str!("../../../kernels/words.metal")),
        (_, true) => printer.out.push_str("#include \"rows.cuh\"\n"),
        (_, false) => printer.out.push_str("#include \"words.cuh\"\n"),
    }
    let used = Used::of(unit, of_blocks);
    for n in &used.structs {
        printer.structure(*n);
    }
    for table in used.tables.iter().filter_map(|n| unit.tables.get(*n)) {
        printer.table(table);
    }
    for function in used.functions.iter().filter_map(|n| unit.functions.get(*n)) {
        printer.function(function);
    }
    for entry in &unit.entries {
        printer.entry(entry);
    }
    printer.out
}

/// The parts that entries reach.
#[derive(Default)]
struct Used {
    structs: BTreeSet<usize>,
    tables: BTreeSet<usize>,
    functions: BTreeSet<usize>,
}

impl Used {
    fn of(unit: &Unit, of_blocks: bool) -> Used {
        let mut used = Used::default();
        let mut waiting: Vec<&Function> = unit.entries.iter().map(|entry| &entry.function).collect();
        while let Some(function) = waiting.pop() {
            for of in function.variables.iter().map(|v| v.of).chain([function.result]) {
                if let Type::Struct(n) = of {
                    used.structs.insert(n);
                }
            }
            let mut see = |expr: &Expr| match expr.kind {
                ExprKind::Table(n) => drop(used.tables.insert(n)),
                ExprKind::Call(n, _) | ExprKind::Each(n, _) if used.functions.insert(n) => {
                    waiting.extend(unit.functions.get(n))
                }
                _ => {}
            };
            function.body.iter().flatten().for_each(|s| s.expressions(&mut see));
        }
        // Functions of the dialect are there already; `rows.cuh` has the library's, too.
        let (structs, functions) = unit.given;
        used.structs.retain(|n| *n >= structs);
        let there = if of_blocks { functions } else { 0 };
        used.functions.retain(|n| *n >= there && unit.functions.get(*n).is_some_and(|f| f.body.is_some()));
        used
    }
}

impl Statement {
    /// Every expression of a statement, those inside others too.
    pub(super) fn expressions<'s>(&'s self, see: &mut dyn FnMut(&'s Expr)) {
        match self {
            Statement::Let(list) => list.iter().filter_map(|(_, x)| x.as_ref()).for_each(|x| x.walk(see)),
            Statement::Do(x) | Statement::Return(Some(x)) => x.walk(see),
            Statement::If(condition, then, otherwise) => {
                condition.walk(see);
                then.iter().chain(otherwise).for_each(|s| s.expressions(see));
            }
            Statement::For(begin, condition, steps, body) => {
                begin.iter().for_each(|s| s.expressions(see));
                condition.iter().chain(steps).for_each(|x| x.walk(see));
                body.iter().for_each(|s| s.expressions(see));
            }
            Statement::While(condition, body) => {
                condition.walk(see);
                body.iter().for_each(|s| s.expressions(see));
            }
            Statement::Block(list) => list.iter().for_each(|s| s.expressions(see)),
            Statement::Unrolled(_, counted) => counted.expressions(see),
            Statement::Shared(..) | Statement::Break | Statement::Continue | Statement::Return(None) => {}
        }
    }
}

impl Expr {
    /// Every expression of it, itself first.
    pub(super) fn walk<'e>(&'e self, see: &mut dyn FnMut(&'e Expr)) {
        see(self);
        match &self.kind {
            ExprKind::Int(_)
            | ExprKind::Float(_)
            | ExprKind::Null
            | ExprKind::Variable(_)
            | ExprKind::Table(_) => {}
            ExprKind::Field(x, _)
            | ExprKind::Prefix(_, x)
            | ExprKind::Convert(x, _)
            | ExprKind::Step(x, ..) => x.walk(see),
            ExprKind::Element(a, b)
            | ExprKind::Offset(a, b)
            | ExprKind::Infix(_, a, b)
            | ExprKind::Assign(a, _, b) => [a, b].into_iter().for_each(|x| x.walk(see)),
            ExprKind::Select(c, a, b) => [c, a, b].into_iter().for_each(|x| x.walk(see)),
            ExprKind::Call(_, list) | ExprKind::Each(_, list) | ExprKind::Build(list) => {
                list.iter().for_each(|x| x.walk(see))
            }
        }
    }
}

struct Printer<'u> {
    unit: &'u Unit,
    dialect: Dialect,
    out: String,
}

/// How tightly an expression binds: without an operator, with one before it, or as a choice.
const WHOLE: u8 = 13;
const BEFORE: u8 = 11;
const CHOICE: u8 = 0;

impl Printer<'_> {
    /// A declaration of a type and a name.
    fn declared(&self, of: Type, name: &str) -> String {
        let spaced = |text: &str| if name.is_empty() { text.to_string() } else { format!("{text} {name}") };
        match of {
            Type::Void => spaced("void"),
            Type::Number(of) => spaced(of.name()),
            Type::Struct(n) => spaced(self.unit.structs.get(n).map_or("", |s| &s.name)),
            Type::Floats(width) => spaced(&format!("floats{width}")),
            Type::Array(of, length) => format!("{}[{length}]", spaced(of.name())),
            Type::Pointer { to, constant, shared } => {
                let only = if constant { "const " } else { "" };
                // C++ finds out by itself which memory is the block's.
                let space = if self.dialect.metal() { "device " } else { "" };
                let own = if shared && self.dialect == Dialect::Plain { "shared " } else { "" };
                format!("{space}{only}{own}{} *{name}", to.name())
            }
        }
    }

    fn structure(&mut self, n: usize) {
        let Some(of) = self.unit.structs.get(n) else { return };
        let _ = writeln!(self.out, "struct {} {{", of.name);
        for (name, of) in &of.fields {
            let _ = writeln!(self.out, "    {} {name};", of.name());
        }
        self.out.push_str("};\n");
    }

    fn table(&mut self, table: &Table) {
        let values: Vec<String> = table.values.iter().map(|x| self.float(*x, table.of)).collect();
        let _ = writeln!(self.out, "TABLE {} {}[] = {{{}}};", table.of.name(), table.name, values.join(", "));
    }

    fn function(&mut self, of: &Function) {
        let params: Vec<String> =
            of.variables[..of.params].iter().map(|v| self.declared(v.of, &v.name)).collect();
        let _ = writeln!(self.out, "DEVICE {}({}) {{", self.declared(of.result, &of.name), params.join(", "));
        self.list(of, of.body.as_deref().unwrap_or_default(), 1);
        self.out.push_str("}\n");
    }

    fn entry(&mut self, entry: &Entry) {
        let (of, (block, resident)) = (&entry.function, entry.bounds);
        let params: Vec<String> =
            of.variables[..of.params].iter().map(|v| self.declared(v.of, &v.name)).collect();
        if self.dialect.metal() {
            // All arguments are in one structure: a kernel has room for 31 buffers alone.
            let _ = writeln!(self.out, "\nstruct {}_arguments {{", of.name);
            for param in &params {
                let _ = writeln!(self.out, "    {param};");
            }
            let _ = writeln!(
                self.out,
                "}};\nkernel void {0}(constant {0}_arguments &given [[buffer(0)]], uint thread_of_grid [[thread_position_in_grid]]) {{",
                of.name
            );
            for v in &of.variables[..of.params] {
                let _ = writeln!(self.out, "    {} = given.{};", self.declared(v.of, &v.name), v.name);
            }
        } else {
            let _ = writeln!(
                self.out,
                "\nKERNEL __launch_bounds__({block}, {resident}) {}({}) {{",
                of.name,
                params.join(", ")
            );
        }
        self.list(of, of.body.as_deref().unwrap_or_default(), 1);
        self.out.push_str("}\n");
    }

    fn line(&mut self, depth: usize, line: &str) {
        let _ = writeln!(self.out, "{}{line}", "    ".repeat(depth));
    }

    fn list(&mut self, of: &Function, list: &[Statement], depth: usize) {
        list.iter().for_each(|statement| self.statement(of, statement, depth));
    }

    fn braced(&mut self, of: &Function, head: &str, list: &[Statement], depth: usize) {
        self.line(depth, &format!("{head} {{"));
        self.list(of, list, depth + 1);
    }

    fn statement(&mut self, of: &Function, statement: &Statement, depth: usize) {
        match statement {
            Statement::Let(_) | Statement::Do(_) => {
                let text = self.simple(of, statement);
                self.line(depth, &format!("{text};"));
            }
            Statement::If(condition, then, otherwise) => {
                let head = format!("if ({})", self.expr(of, condition, 0));
                self.braced(of, &head, then, depth);
                if !otherwise.is_empty() {
                    self.braced(of, "} else", otherwise, depth);
                }
                self.line(depth, "}");
            }
            Statement::Shared(n, length) => {
                let name = of.variables.get(*n).map_or("", |v| &v.name);
                let line = match (self.dialect == Dialect::Plain, length) {
                    (true, None) => format!("shared float {name}[];"),
                    (true, Some(length)) => format!("shared float {name}[{length}];"),
                    (false, None) => format!("extern __shared__ __align__(16) float {name}[];"),
                    (false, Some(length)) => format!("__shared__ __align__(16) float {name}[{length}];"),
                };
                self.line(depth, &line);
            }
            Statement::Unrolled(times, counted) if self.dialect == Dialect::Plain => {
                let before = self.out.len();
                self.statement(of, counted, depth);
                self.out.insert_str(before + 4 * depth, &format!("unroll({times}) "));
            }
            Statement::Unrolled(times, counted) => {
                let _ = writeln!(self.out, "#pragma unroll {times}");
                self.statement(of, counted, depth);
            }
            Statement::For(begin, condition, steps, body) => {
                let begin = begin.as_ref().map_or(String::new(), |s| self.simple(of, s));
                let condition = condition.as_ref().map_or(String::new(), |x| self.expr(of, x, 0));
                let steps: Vec<String> = steps.iter().map(|x| self.expr(of, x, 0)).collect();
                self.braced(of, &format!("for ({begin}; {condition}; {})", steps.join(", ")), body, depth);
                self.line(depth, "}");
            }
            Statement::While(condition, body) => {
                let head = format!("while ({})", self.expr(of, condition, 0));
                self.braced(of, &head, body, depth);
                self.line(depth, "}");
            }
            Statement::Break => self.line(depth, "break;"),
            Statement::Continue => self.line(depth, "continue;"),
            Statement::Return(None) => self.line(depth, "return;"),
            Statement::Return(Some(x)) => {
                let text = self.expr(of, x, 0);
                self.line(depth, &format!("return {text};"));
            }
            Statement::Block(list) => {
                self.line(depth, "{");
                self.list(of, list, depth + 1);
                self.line(depth, "}");
            }
        }
    }

    /// A declaration or an expression, as loops begin with.
    fn simple(&self, of: &Function, statement: &Statement) -> String {
        let list = match statement {
            Statement::Let(list) => list,
            Statement::Do(x) => return self.expr(of, x, 0),
            _ => return String::new(),
        };
        let mut text = String::new();
        for (at, (n, value)) in list.iter().enumerate() {
            let Some(v) = of.variables.get(*n) else { continue };
            let declared = match (at, v.of) {
                (0, _) => {
                    format!("{}{}", if v.constant { "const " } else { "" }, self.declared(v.of, &v.name))
                }
                (_, Type::Pointer { .. }) => format!(", *{}", v.name),
                (_, Type::Array(_, length)) => format!(", {}[{length}]", v.name),
                _ => format!(", {}", v.name),
            };
            text.push_str(&declared);
            if let Some(value) = value {
                let _ = write!(text, " = {}", self.expr(of, value, CHOICE));
            }
        }
        text
    }

    fn float(&self, x: f64, of: Number) -> String {
        match of == Number::F32 || self.dialect.metal() {
            true => format!("{:?}f", x as f32),
            false => format!("{x:?}"),
        }
    }

    /// An expression for a place that binds so tightly.
    fn expr(&self, of: &Function, x: &Expr, place: u8) -> String {
        let (text, binds) = self.bound(of, x);
        if binds < place { format!("({text})") } else { text }
    }

    fn bound(&self, of: &Function, x: &Expr) -> (String, u8) {
        let joined =
            |list: &[Expr]| list.iter().map(|x| self.expr(of, x, CHOICE)).collect::<Vec<_>>().join(", ");
        let typed = match x.of {
            Type::Number(of) => of,
            _ => Number::I32,
        };
        let whole = x.of;
        match &x.kind {
            ExprKind::Int(n) => match typed {
                Number::Bool => (if *n != 0 { "true" } else { "false" }.into(), WHOLE),
                Number::I64 => (format!("{n}{}", if self.dialect.metal() { "l" } else { "ll" }), WHOLE),
                Number::U32 => (format!("{n}u"), WHOLE),
                _ => (n.to_string(), WHOLE),
            },
            ExprKind::Float(value) => (self.float(*value, typed), WHOLE),
            ExprKind::Null => ("nullptr".into(), WHOLE),
            ExprKind::Variable(n) => (of.variables.get(*n).map_or(String::new(), |v| v.name.clone()), WHOLE),
            ExprKind::Table(n) => (self.unit.tables.get(*n).map_or(String::new(), |t| t.name.clone()), WHOLE),
            ExprKind::Element(at, index)
                if matches!(at.of, Type::Floats(_)) && self.dialect != Dialect::Plain =>
            {
                (format!("{}.x[{}]", self.expr(of, at, WHOLE), self.expr(of, index, 0)), WHOLE)
            }
            ExprKind::Element(at, index) => {
                (format!("{}[{}]", self.expr(of, at, WHOLE), self.expr(of, index, 0)), WHOLE)
            }
            ExprKind::Offset(at, by) => (format!("{} + {}", self.expr(of, at, 9), self.expr(of, by, 10)), 9),
            ExprKind::Field(from, n) => {
                let field = match from.of {
                    Type::Struct(s) => self.unit.structs.get(s).and_then(|s| s.fields.get(*n)),
                    _ => None,
                };
                (format!("{}.{}", self.expr(of, from, WHOLE), field.map_or("", |f| &f.0)), WHOLE)
            }
            ExprKind::Prefix(operator, x) => {
                let mark = match operator {
                    Prefix::Minus => "-",
                    Prefix::Not => "!",
                    Prefix::Flip => "~",
                };
                // Two signs would be one operator.
                (format!("{mark}{}", self.expr(of, x, BEFORE + 1)), BEFORE)
            }
            ExprKind::Infix(operator, a, b) => {
                let (_, mark, binds) = operator.row();
                (format!("{} {mark} {}", self.expr(of, a, binds), self.expr(of, b, binds + 1)), binds)
            }
            ExprKind::Select(c, a, b) => {
                let (c, a) = (self.expr(of, c, 1), self.expr(of, a, CHOICE));
                (format!("{c} ? {a} : {}", self.expr(of, b, CHOICE)), CHOICE)
            }
            ExprKind::Convert(x, said) => match said {
                true => {
                    let to = if matches!(whole, Type::Floats(_)) { whole } else { Type::Number(typed) };
                    (format!("{}({})", self.declared(to, ""), self.expr(of, x, CHOICE)), WHOLE)
                }
                false => self.bound(of, x),
            },
            ExprKind::Call(n, given) | ExprKind::Each(n, given) => {
                let Some(function) = self.unit.functions.get(*n) else { return (String::new(), WHOLE) };
                // Numbers that are written are arguments of a template.
                let written = |i: usize| {
                    self.dialect != Dialect::Plain && function.variables.get(i).is_some_and(|v| v.constant)
                };
                let list = |fixed: bool| {
                    let of_kind = given.iter().enumerate().filter(|(i, _)| written(*i) == fixed);
                    of_kind.map(|(_, x)| self.expr(of, x, CHOICE)).collect::<Vec<_>>().join(", ")
                };
                let constants = match list(true) {
                    none if none.is_empty() => none,
                    some => format!("<{some}>"),
                };
                (format!("{}{constants}({})", function.name, list(false)), WHOLE)
            }
            ExprKind::Build(list) if matches!(x.of, Type::Floats(_)) => {
                (format!("{}({})", self.declared(x.of, ""), joined(list)), WHOLE)
            }
            ExprKind::Build(list) => (format!("{{{}}}", joined(list)), WHOLE),
            ExprKind::Assign(to, operator, value) => {
                let mark = operator.map_or(String::new(), |operator: Infix| operator.to_string());
                // Structures are copied between addresses of one space alone.
                if self.dialect.metal() && to.of == Type::Number(Number::Bf16) {
                    let (to, from) = (self.expr(of, to, WHOLE), self.expr(of, value, WHOLE));
                    return (format!("{to}.bits = {from}.bits"), CHOICE);
                }
                (format!("{} {mark}= {}", self.expr(of, to, BEFORE), self.expr(of, value, CHOICE)), CHOICE)
            }
            ExprKind::Step(x, by, new) => {
                let mark = if *by > 0 { "++" } else { "--" };
                let place = self.expr(of, x, BEFORE + 1);
                (if *new { format!("{mark}{place}") } else { format!("{place}{mark}") }, BEFORE + 1)
            }
        }
    }
}
