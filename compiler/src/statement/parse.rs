//! Statements from tokens: names are found, overloads chosen and conversions made visible.

use super::expand::{Kind, Token, expand};
use super::{
    Entry, Expr, ExprKind, Function, Infix, LIBRARY, Number, Prefix, ROW_WORDS, Statement, StatementError,
    Struct, Table, Type, Unit, Variable, WORDS,
};
use std::cmp::Reverse;
use std::collections::HashMap;

type Result<T> = std::result::Result<T, StatementError>;

/// The deepest nesting of expressions and blocks; no kernel is deeper.
const DEEPEST: usize = 200;

pub(super) fn unit(text: &str) -> Result<Unit> {
    let mut parser = Parser {
        list: vec![],
        at: 0,
        unit: Unit { structs: vec![], tables: vec![], functions: vec![], given: (0, 0), entries: vec![] },
        types: Number::ALL.iter().map(|n| (n.name().to_string(), *n)).collect(),
        scopes: vec![],
        variables: vec![],
        result: Type::Void,
        depth: 0,
    };
    for part in [WORDS, ROW_WORDS, LIBRARY, text] {
        parser.unit.given = (parser.unit.structs.len(), parser.unit.functions.len());
        parser.list = expand(part)?;
        parser.at = 0;
        while parser.at < parser.list.len() {
            parser.item()?;
        }
    }
    Ok(parser.unit)
}

struct Parser {
    list: Vec<Token>,
    at: usize,
    unit: Unit,
    /// Numbers by name, those of `typedef` too.
    types: HashMap<String, Number>,
    /// Names of the function under way, the innermost block last.
    scopes: Vec<HashMap<String, usize>>,
    variables: Vec<Variable>,
    result: Type,
    depth: usize,
}

/// A type before its star.
#[derive(Clone, Copy)]
struct Base {
    of: Type,
    constant: bool,
    shared: bool,
}

fn number(of: Number) -> Type {
    Type::Number(of)
}

/// The adjacent floats of a name.
fn floats(name: &str) -> Option<Type> {
    match name {
        "floats4" => Some(Type::Floats(4)),
        "floats8" => Some(Type::Floats(8)),
        _ => None,
    }
}

fn int(value: i64) -> Expr {
    let fits = i32::try_from(value).is_ok();
    Expr { of: number(if fits { Number::I32 } else { Number::I64 }), kind: ExprKind::Int(value) }
}

/// The type of arithmetic: `int` at least.
fn promoted(of: Number) -> Number {
    of.max(Number::I32)
}

impl Parser {
    fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        let token = self.list.get(self.at).or(self.list.last());
        Err(StatementError::at(token.map_or(1, |t| t.line), message.into()))
    }

    fn peek(&self, ahead: usize) -> &str {
        self.list.get(self.at + ahead).map_or("", Token::text)
    }

    fn is(&self, text: &str) -> bool {
        self.peek(0) == text
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.is(text);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, text: &str) -> Result<()> {
        if self.take(text) {
            return Ok(());
        }
        self.error(format!("`{text}` is expected, not `{}`", self.peek(0)))
    }

    fn name(&mut self) -> Result<String> {
        let Some(Token { kind: Kind::Word(name), .. }) = self.list.get(self.at) else {
            return self.error(format!("a name is expected, not `{}`", self.peek(0)));
        };
        let name = name.clone();
        self.at += 1;
        Ok(name)
    }

    fn deeper<T>(&mut self, inside: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth >= DEEPEST {
            return self.error(format!("more than {DEEPEST} levels"));
        }
        self.depth += 1;
        let result = inside(self);
        self.depth -= 1;
        result
    }

    // --- types -----------------------------------------------------------------------------------

    /// A type by its name, without a star.
    fn named(&self, name: &str) -> Option<Type> {
        if name == "void" {
            return Some(Type::Void);
        }
        if let Some(of) = self.types.get(name) {
            return Some(number(*of));
        }
        if let Some(of) = floats(name) {
            return Some(of);
        }
        self.unit.structs.iter().position(|s| s.name == name).map(Type::Struct)
    }

    fn base(&mut self) -> Result<Base> {
        let constant = self.take("const");
        let shared = self.take("shared");
        let name = self.name()?;
        match self.named(&name) {
            Some(of) => Ok(Base { of, constant, shared }),
            None => self.error(format!("`{name}` is no type")),
        }
    }

    /// The type of what has this base, a star or none.
    fn starred(&mut self, base: Base) -> Result<Type> {
        let Base { of, constant, shared } = base;
        match (self.take("*"), of) {
            (false, _) if shared => self.error("a variable of a thread that would be shared"),
            (false, of) => Ok(of),
            (true, Type::Number(to)) => Ok(Type::Pointer { to, constant, shared }),
            (true, _) => self.error("an address of something that is no number"),
        }
    }

    // --- items -----------------------------------------------------------------------------------

    fn item(&mut self) -> Result<()> {
        match self.peek(0) {
            "typedef" => {
                self.at += 1;
                let of = self.base()?.of;
                let name = self.name()?;
                let Type::Number(of) = of else {
                    return self.error("a name for something that is no number");
                };
                self.types.insert(name, of);
                self.expect(";")
            }
            "struct" => self.structure(),
            "TABLE" => self.table(),
            "KERNEL" => {
                self.at += 1;
                self.entry()
            }
            _ => {
                self.take("DEVICE");
                let function = self.function()?;
                self.unit.functions.push(function);
                Ok(())
            }
        }
    }

    fn structure(&mut self) -> Result<()> {
        self.expect("struct")?;
        let name = self.name()?;
        self.expect("{")?;
        let mut fields = vec![];
        while !self.take("}") {
            let Type::Number(of) = self.base()?.of else { return self.error("a field is a number") };
            loop {
                fields.push((self.name()?, of));
                if !self.take(",") {
                    break;
                }
            }
            self.expect(";")?;
        }
        self.unit.structs.push(Struct { name, fields });
        self.expect(";")
    }

    fn table(&mut self) -> Result<()> {
        self.expect("TABLE")?;
        let Type::Number(of) = self.base()?.of else { return self.error("a table is of numbers") };
        let name = self.name()?;
        for mark in ["[", "]", "=", "{"] {
            self.expect(mark)?;
        }
        let mut values = vec![];
        while !self.take("}") {
            let negative = self.take("-");
            let value = match self.primary()?.kind {
                ExprKind::Float(x) => x,
                ExprKind::Int(n) => n as f64,
                _ => return self.error("a table has constants"),
            };
            values.push(if negative { -value } else { value });
            if !self.take(",") && !self.is("}") {
                return self.error("`,` or `}` is expected");
            }
        }
        self.unit.tables.push(Table { name, of, values });
        self.expect(";")
    }

    fn entry(&mut self) -> Result<()> {
        self.expect("__launch_bounds__")?;
        self.expect("(")?;
        let block = self.constant()?;
        self.expect(",")?;
        let resident = self.constant()?;
        self.expect(")")?;
        // An entry gives nothing, which its declaration does not say.
        let name = self.name()?;
        let function = self.rest(name, Type::Void)?;
        self.together(function.body.as_deref().unwrap_or_default())?;
        let (Ok(block), Ok(resident)) = (block.try_into(), resident.try_into()) else {
            return self.error("bounds of a launch that no GPU has");
        };
        self.unit.entries.push(Entry { function, bounds: (block, resident) });
        Ok(())
    }

    /// Refuses what threads do together inside another expression: each such thing is a statement.
    fn together(&self, list: &[Statement]) -> Result<()> {
        let mut inside = false;
        for statement in list {
            let mut whole = |x: &Expr| match &x.kind {
                ExprKind::Call(_, given) => given.iter().for_each(|x| self.found_together(x, &mut inside)),
                _ => self.found_together(x, &mut inside),
            };
            match statement {
                Statement::Let(list) => list.iter().filter_map(|(_, x)| x.as_ref()).for_each(whole),
                Statement::Do(x) => whole(x),
                Statement::If(condition, then, otherwise) => {
                    self.found_together(condition, &mut inside);
                    self.together(then)?;
                    self.together(otherwise)?;
                }
                Statement::For(begin, condition, steps, body) => {
                    begin.iter().for_each(|s| s.expressions(&mut |x| self.is_together(x, &mut inside)));
                    condition.iter().chain(steps).for_each(|x| self.found_together(x, &mut inside));
                    self.together(body)?;
                }
                Statement::While(condition, body) => {
                    self.found_together(condition, &mut inside);
                    self.together(body)?;
                }
                Statement::Unrolled(_, counted) => self.together(std::slice::from_ref(counted))?,
                Statement::Block(list) => self.together(list)?,
                Statement::Return(Some(x)) => self.found_together(x, &mut inside),
                Statement::Shared(..) | Statement::Return(None) | Statement::Break | Statement::Continue => {}
            }
        }
        match inside {
            true => self.error("what threads do together is a statement of its own"),
            false => Ok(()),
        }
    }

    fn found_together(&self, x: &Expr, found: &mut bool) {
        x.walk(&mut |x| self.is_together(x, found));
    }

    fn is_together(&self, x: &Expr, found: &mut bool) {
        *found |= matches!(x.kind, ExprKind::Call(n, _) if self.unit.together(n));
    }

    fn constant(&mut self) -> Result<i64> {
        match self.primary()?.kind {
            ExprKind::Int(n) => Ok(n),
            _ => self.error("a whole number is expected"),
        }
    }

    fn function(&mut self) -> Result<Function> {
        let base = self.base()?;
        let result = self.starred(base)?;
        let name = self.name()?;
        self.rest(name, result)
    }

    /// From the parameters on.
    fn rest(&mut self, name: String, result: Type) -> Result<Function> {
        self.expect("(")?;
        self.scopes = vec![HashMap::new()];
        self.variables = vec![];
        self.result = result;
        while !self.take(")") {
            let base = self.base()?;
            let of = self.starred(base)?;
            // One that is not used may have no name.
            let name = if matches!(self.peek(0), "," | ")") { String::new() } else { self.name()? };
            self.declare(name, of, base.constant && !matches!(of, Type::Pointer { .. }))?;
            if !self.take(",") && !self.is(")") {
                return self.error("`,` or `)` is expected");
            }
        }
        let params = self.variables.len();
        let body = if self.take(";") { None } else { Some(self.block()?) };
        Ok(Function { name, result, params, variables: std::mem::take(&mut self.variables), body })
    }

    fn declare(&mut self, name: String, of: Type, constant: bool) -> Result<usize> {
        if of == Type::Void {
            return self.error(format!("`{name}` would hold nothing"));
        }
        let number = self.variables.len();
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name.clone(), number);
        }
        self.variables.push(Variable { name, of, constant });
        Ok(number)
    }

    // --- statements ------------------------------------------------------------------------------

    fn block(&mut self) -> Result<Vec<Statement>> {
        self.expect("{")?;
        self.scoped(|p| {
            let mut list = vec![];
            while !p.take("}") {
                if p.at >= p.list.len() {
                    return p.error("`}` is missing");
                }
                list.extend(p.statement()?);
            }
            Ok(list)
        })
    }

    fn scoped<T>(&mut self, inside: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.scopes.push(HashMap::new());
        let result = self.deeper(inside);
        self.scopes.pop();
        result
    }

    /// The statements of a loop or a branch.
    fn body(&mut self) -> Result<Vec<Statement>> {
        if self.is("{") {
            return self.block();
        }
        self.scoped(|p| Ok(p.statement()?.into_iter().collect()))
    }

    fn condition(&mut self) -> Result<Expr> {
        let condition = self.expression()?;
        self.truth(condition)
    }

    /// `None` for an empty one.
    fn statement(&mut self) -> Result<Option<Statement>> {
        let statement = match self.peek(0) {
            ";" => {
                self.at += 1;
                return Ok(None);
            }
            "{" => return Ok(Some(Statement::Block(self.block()?))),
            "if" => {
                self.at += 1;
                self.expect("(")?;
                let condition = self.condition()?;
                self.expect(")")?;
                let then = self.body()?;
                let otherwise = if self.take("else") { self.body()? } else { vec![] };
                return Ok(Some(Statement::If(condition, then, otherwise)));
            }
            "for" => {
                self.at += 1;
                return self.scoped(Self::counted).map(Some);
            }
            "unroll" => {
                self.at += 1;
                self.expect("(")?;
                let Ok(times) = self.constant()?.try_into() else {
                    return self.error("a loop unrolled so often");
                };
                self.expect(")")?;
                self.expect("for")?;
                let counted = self.scoped(Self::counted)?;
                return Ok(Some(Statement::Unrolled(times, Box::new(counted))));
            }
            "shared" if self.peek(2) != "*" => self.memory()?,
            "while" => {
                self.at += 1;
                self.expect("(")?;
                let condition = self.condition()?;
                self.expect(")")?;
                return Ok(Some(Statement::While(condition, self.body()?)));
            }
            "break" => {
                self.at += 1;
                Statement::Break
            }
            "continue" => {
                self.at += 1;
                Statement::Continue
            }
            "return" => {
                self.at += 1;
                let value = if self.is(";") { None } else { Some(self.expression()?) };
                match (value, self.result) {
                    (None, Type::Void) => Statement::Return(None),
                    (Some(value), result) if result != Type::Void => {
                        Statement::Return(Some(self.convert(value, result)?))
                    }
                    _ => return self.error("what is returned is not what the function gives"),
                }
            }
            _ => self.simple()?,
        };
        self.expect(";")?;
        Ok(Some(statement))
    }

    /// Memory of the block: of a length that is written, or of what the launch gives.
    fn memory(&mut self) -> Result<Statement> {
        self.expect("shared")?;
        let Some(Type::Number(to @ Number::F32)) = self.named(self.peek(0)) else {
            return self.error("memory of a block is of `float`");
        };
        self.at += 1;
        let name = self.name()?;
        self.expect("[")?;
        let length = if self.is("]") { None } else { Some(self.constant()?) };
        self.expect("]")?;
        let Ok(length) = length.map(u64::try_from).transpose() else {
            return self.error("memory of no length");
        };
        let variable = self.declare(name, Type::Pointer { to, constant: false, shared: true }, true)?;
        Ok(Statement::Shared(variable, length))
    }

    /// After `for`.
    fn counted(&mut self) -> Result<Statement> {
        self.expect("(")?;
        let begin = if self.is(";") { None } else { Some(Box::new(self.simple()?)) };
        self.expect(";")?;
        let condition = if self.is(";") { None } else { Some(self.condition()?) };
        self.expect(";")?;
        let mut steps = vec![];
        while !self.is(")") {
            steps.push(self.expression()?);
            if !self.take(",") {
                break;
            }
        }
        self.expect(")")?;
        Ok(Statement::For(begin, condition, steps, self.body()?))
    }

    /// Whether a declaration begins here.
    fn declares(&self) -> bool {
        self.is("const") || self.is("shared") || (self.named(self.peek(0)).is_some() && self.peek(1) != "(")
    }

    /// A declaration, or expressions.
    fn simple(&mut self) -> Result<Statement> {
        if !self.declares() {
            let mut list = vec![Statement::Do(self.expression()?)];
            while self.take(",") {
                list.push(Statement::Do(self.expression()?));
            }
            return Ok(match list.len() {
                1 => list.remove(0),
                _ => Statement::Block(list),
            });
        }
        let base = self.base()?;
        let constant = base.constant;
        let mut list = vec![];
        loop {
            let mut of = self.starred(base)?;
            let name = self.name()?;
            if self.take("[") {
                let Type::Number(element) = of else { return self.error("an array is of numbers") };
                let length = self.constant()?;
                self.expect("]")?;
                of =
                    Type::Array(element, length.try_into().or_else(|_| self.error("an array of no length"))?);
            }
            let value = if self.take("=") { Some(self.initial(of)?) } else { None };
            let constant = constant && !matches!(of, Type::Pointer { .. });
            list.push((self.declare(name, of, constant)?, value));
            if !self.take(",") {
                return Ok(Statement::Let(list));
            }
        }
    }

    fn initial(&mut self, of: Type) -> Result<Expr> {
        if !self.take("{") {
            let value = self.choice()?;
            return self.convert(value, of);
        }
        let types: Vec<Number> = match of {
            Type::Struct(n) => self.unit.structs[n].fields.iter().map(|(_, of)| *of).collect(),
            Type::Array(of, length) => vec![of; length.min(1 << 16) as usize],
            _ => return self.error("braces for what is no array"),
        };
        let mut list = vec![];
        while !self.take("}") {
            let value = self.choice()?;
            let Some(of) = types.get(list.len()) else { return self.error("more values than there is room") };
            list.push(self.convert(value, number(*of))?);
            if !self.take(",") && !self.is("}") {
                return self.error("`,` or `}` is expected");
            }
        }
        if list.len() < types.len() {
            return self.error("fewer values than there is room");
        }
        Ok(Expr { of, kind: ExprKind::Build(list) })
    }

    // --- expressions -----------------------------------------------------------------------------

    /// With assignments.
    fn expression(&mut self) -> Result<Expr> {
        let left = self.choice()?;
        let mark = self.peek(0).to_string();
        let operator = match mark.as_str() {
            "=" => None,
            "+=" | "-=" | "*=" | "/=" | "%=" | "&=" | "|=" | "^=" | "<<=" | ">>=" => {
                Infix::of(&mark[..mark.len() - 1]).map(|(operator, _)| operator)
            }
            _ => return Ok(left),
        };
        self.place(&left)?;
        self.at += 1;
        let right = self.deeper(Self::expression)?;
        let of = left.of;
        let right = match (operator, of, right.of) {
            (None, ..) => self.convert(right, of)?,
            // As C does: in the wider type, and back.
            (Some(_), Type::Number(a), Type::Number(b))
                if !matches!(operator, Some(Infix::Left | Infix::Right)) =>
            {
                self.convert(right, number(promoted(a).max(promoted(b))))?
            }
            (Some(_), Type::Number(_), Type::Number(_)) => right,
            _ => return self.error("an operator of what are no numbers"),
        };
        Ok(Expr { of, kind: ExprKind::Assign(Box::new(left), operator, Box::new(right)) })
    }

    /// Whether an expression is a place that can be written.
    fn place(&self, expr: &Expr) -> Result<()> {
        match &expr.kind {
            ExprKind::Variable(n) if !self.variables[*n].constant => Ok(()),
            ExprKind::Field(of, _) => self.place(of),
            ExprKind::Element(of, _) => match (of.of, &of.kind) {
                (Type::Pointer { constant: false, .. }, _) => Ok(()),
                (Type::Array(..), ExprKind::Variable(_)) => self.place(of),
                _ => self.error("what is only read would be written"),
            },
            _ => self.error("what is no place would be written"),
        }
    }

    fn choice(&mut self) -> Result<Expr> {
        let condition = self.infix(1)?;
        if !self.take("?") {
            return Ok(condition);
        }
        let condition = self.truth(condition)?;
        let a = self.deeper(Self::choice)?;
        self.expect(":")?;
        let b = self.deeper(Self::choice)?;
        let of = match (a.of, b.of) {
            (Type::Number(a), Type::Number(b)) if a != b => number(promoted(a).max(promoted(b))),
            (Type::Pointer { to, constant: a, shared }, Type::Pointer { constant: b, .. }) => {
                Type::Pointer { to, constant: a || b, shared }
            }
            (of @ Type::Floats(_), _) | (_, of @ Type::Floats(_)) => of,
            (of, _) => of,
        };
        let (a, b) = (self.convert(a, of)?, self.convert(b, of)?);
        Ok(Expr { of, kind: ExprKind::Select(Box::new(condition), Box::new(a), Box::new(b)) })
    }

    fn infix(&mut self, least: u8) -> Result<Expr> {
        let mut left = self.deeper(Self::prefix)?;
        while let Some((operator, binds)) = Infix::of(self.peek(0)).filter(|(_, binds)| *binds >= least) {
            self.at += 1;
            let right = self.deeper(|p| p.infix(binds + 1))?;
            left = self.joined(operator, left, right)?;
        }
        Ok(left)
    }

    fn joined(&self, operator: Infix, a: Expr, b: Expr) -> Result<Expr> {
        let (Type::Number(x), Type::Number(y)) = (a.of, b.of) else {
            return match (operator, a.of, b.of) {
                (Infix::Add, Type::Pointer { .. }, Type::Number(n)) if !n.floats() => {
                    Ok(Expr { of: a.of, kind: ExprKind::Offset(Box::new(a), Box::new(b)) })
                }
                (Infix::Add | Infix::Sub | Infix::Mul | Infix::Div, of @ Type::Floats(_), _)
                | (Infix::Add | Infix::Sub | Infix::Mul | Infix::Div, _, of @ Type::Floats(_)) => {
                    let (a, b) = (self.convert(a, of)?, self.convert(b, of)?);
                    Ok(Expr { of, kind: ExprKind::Infix(operator, Box::new(a), Box::new(b)) })
                }
                _ => self.error(format!("`{operator}` of what are no numbers")),
            };
        };
        if matches!(operator, Infix::Both | Infix::Either) {
            let (a, b) = (self.truth(a)?, self.truth(b)?);
            return Ok(Expr {
                of: number(Number::Bool),
                kind: ExprKind::Infix(operator, Box::new(a), Box::new(b)),
            });
        }
        let whole = matches!(
            operator,
            Infix::Left | Infix::Right | Infix::Rest | Infix::And | Infix::Or | Infix::Xor
        );
        if x == Number::Bf16 || y == Number::Bf16 || (whole && (x.floats() || y.floats())) {
            return self.error(format!("`{operator}` of {} and {}", x.name(), y.name()));
        }
        let shift = matches!(operator, Infix::Left | Infix::Right);
        let of = if shift { promoted(x) } else { promoted(x).max(promoted(y)) };
        let a = self.convert(a, number(of))?;
        let b = if shift { b } else { self.convert(b, number(of))? };
        let result = if operator.compares() { Number::Bool } else { of };
        Ok(Expr { of: number(result), kind: ExprKind::Infix(operator, Box::new(a), Box::new(b)) })
    }

    fn prefix(&mut self) -> Result<Expr> {
        let mark = self.peek(0).to_string();
        match mark.as_str() {
            "-" | "!" | "~" => {
                self.at += 1;
                let x = self.deeper(Self::prefix)?;
                if let (of @ Type::Floats(_), "-") = (x.of, mark.as_str()) {
                    return Ok(Expr { of, kind: ExprKind::Prefix(Prefix::Minus, Box::new(x)) });
                }
                let Type::Number(of) = x.of else { return self.error("an operator of what is no number") };
                let (operator, of) = match mark.as_str() {
                    "-" => (Prefix::Minus, promoted(of)),
                    "~" => (Prefix::Flip, promoted(of)),
                    _ => (Prefix::Not, Number::Bool),
                };
                let x = if operator == Prefix::Not { self.truth(x)? } else { self.convert(x, number(of))? };
                Ok(Expr { of: number(of), kind: ExprKind::Prefix(operator, Box::new(x)) })
            }
            "++" | "--" => {
                self.at += 1;
                let x = self.deeper(Self::prefix)?;
                self.place(&x)?;
                let by = if mark == "++" { 1 } else { -1 };
                Ok(Expr { of: x.of, kind: ExprKind::Step(Box::new(x), by, true) })
            }
            "*" => {
                self.at += 1;
                let x = self.deeper(Self::prefix)?;
                self.element(x, int(0))
            }
            "(" if self.peek(2) == ")" && self.named(self.peek(1)).is_some() => {
                self.at += 1;
                let name = self.name()?;
                self.expect(")")?;
                let x = self.deeper(Self::prefix)?;
                self.cast(&name, x)
            }
            _ => self.postfix(),
        }
    }

    fn cast(&self, name: &str, x: Expr) -> Result<Expr> {
        match (self.named(name), x.of) {
            (Some(of @ Type::Floats(_)), Type::Number(Number::F32)) => {
                Ok(Expr { of, kind: ExprKind::Convert(Box::new(x), true) })
            }
            (Some(Type::Number(of)), Type::Number(from)) if of != Number::Bf16 && from != Number::Bf16 => {
                Ok(Expr { of: number(of), kind: ExprKind::Convert(Box::new(x), true) })
            }
            _ => self.error(format!("a value that cannot be made `{name}`")),
        }
    }

    fn element(&self, of: Expr, index: Expr) -> Result<Expr> {
        let (to, index_of) = match (of.of, index.of) {
            (Type::Pointer { to, .. } | Type::Array(to, _), Type::Number(n)) => (to, n),
            (Type::Floats(width), Type::Number(n)) => match index.kind {
                ExprKind::Int(at) if (0..width as i64).contains(&at) => (Number::F32, n),
                _ => return self.error(format!("one of {width} floats has a number that is written")),
            },
            _ => return self.error("an element of what has none"),
        };
        if index_of.floats() {
            return self.error("an index that is not whole");
        }
        Ok(Expr { of: number(to), kind: ExprKind::Element(Box::new(of), Box::new(index)) })
    }

    fn postfix(&mut self) -> Result<Expr> {
        let mut x = self.primary()?;
        loop {
            if self.take("[") {
                let index = self.deeper(Self::expression)?;
                self.expect("]")?;
                x = self.element(x, index)?;
            } else if self.take(".") {
                let name = self.name()?;
                let Type::Struct(n) = x.of else { return self.error("a field of what has none") };
                let fields = &self.unit.structs[n].fields;
                let Some(at) = fields.iter().position(|(field, _)| *field == name) else {
                    return self.error(format!("there is no field `{name}`"));
                };
                x = Expr { of: number(fields[at].1), kind: ExprKind::Field(Box::new(x), at) };
            } else if self.is("++") || self.is("--") {
                self.place(&x)?;
                let by = if self.is("++") { 1 } else { -1 };
                self.at += 1;
                x = Expr { of: x.of, kind: ExprKind::Step(Box::new(x), by, false) };
            } else {
                return Ok(x);
            }
        }
    }

    fn primary(&mut self) -> Result<Expr> {
        let Some(token) = self.list.get(self.at).cloned() else {
            return self.error("an expression is missing");
        };
        match &token.kind {
            Kind::Number(text) => {
                self.at += 1;
                self.literal(text)
            }
            Kind::Mark("(") => {
                self.at += 1;
                let x = self.deeper(Self::expression)?;
                self.expect(")")?;
                Ok(x)
            }
            Kind::Word(word) => {
                self.at += 1;
                self.word(word)
            }
            Kind::Mark(mark) => self.error(format!("`{mark}` begins no expression")),
        }
    }

    fn literal(&self, text: &str) -> Result<Expr> {
        let wrong = || self.error(format!("`{text}` is no number"));
        if let Some(digits) = text.strip_prefix("0x") {
            let unsigned = digits.ends_with('u');
            let Ok(n) = u32::from_str_radix(digits.trim_end_matches('u'), 16) else { return wrong() };
            let small = !unsigned && n <= i32::MAX as u32;
            let of = number(if small { Number::I32 } else { Number::U32 });
            return Ok(Expr { of, kind: ExprKind::Int(n.into()) });
        }
        if let Some(digits) = text.strip_suffix("ll") {
            let Ok(n) = digits.parse() else { return wrong() };
            return Ok(Expr { of: number(Number::I64), kind: ExprKind::Int(n) });
        }
        if let Some(digits) = text.strip_suffix('u') {
            let Ok(n) = digits.parse::<u32>() else { return wrong() };
            return Ok(Expr { of: number(Number::U32), kind: ExprKind::Int(n.into()) });
        }
        if let Some(digits) = text.strip_suffix('f') {
            let Ok(x) = digits.parse() else { return wrong() };
            return Ok(Expr { of: number(Number::F32), kind: ExprKind::Float(x) });
        }
        if let Ok(n) = text.parse::<i64>() {
            return Ok(int(n));
        }
        let Ok(x) = text.parse() else { return wrong() };
        Ok(Expr { of: number(Number::Wide), kind: ExprKind::Float(x) })
    }

    fn word(&mut self, word: &str) -> Result<Expr> {
        if matches!(word, "true" | "false") {
            return Ok(Expr { of: number(Number::Bool), kind: ExprKind::Int(i64::from(word == "true")) });
        }
        // A zero becomes the address that its place asks for.
        if word == "nullptr" {
            return Ok(int(0));
        }
        if self.is("(") {
            self.at += 1;
            let mut given = vec![];
            while !self.take(")") {
                given.push(self.deeper(Self::expression)?);
                if !self.take(",") && !self.is(")") {
                    return self.error("`,` or `)` is expected");
                }
            }
            return match (self.named(word), given.len()) {
                (Some(_), 1) => self.cast(word, given.remove(0)),
                (Some(of @ Type::Floats(width)), n) if n as u64 == width => {
                    let list = given.into_iter().map(|x| self.convert(x, number(Number::F32)));
                    Ok(Expr { of, kind: ExprKind::Build(list.collect::<Result<_>>()?) })
                }
                (Some(_), _) => self.error(format!("`{word}` of several values")),
                (None, _) => self.call(word, given),
            };
        }
        if let Some(number) = self.scopes.iter().rev().find_map(|scope| scope.get(word)) {
            return Ok(Expr { of: self.variables[*number].of, kind: ExprKind::Variable(*number) });
        }
        if let Some(n) = self.unit.tables.iter().position(|table| table.name == word) {
            let table = &self.unit.tables[n];
            return Ok(Expr {
                of: Type::Array(table.of, table.values.len() as u64),
                kind: ExprKind::Table(n),
            });
        }
        self.error(format!("nothing is named `{word}`"))
    }

    /// The function of a name that its arguments suit best.
    fn call(&self, name: &str, given: Vec<Expr>) -> Result<Expr> {
        let suits = |function: &Function| -> Option<u32> {
            if function.name != name || function.params != given.len() {
                return None;
            }
            function.signature().zip(&given).map(|(to, from)| distance(from, to)).sum()
        };
        let found = self.unit.functions.iter().enumerate().filter_map(|(n, f)| Some((suits(f)?, n)));
        let found: Vec<(u32, usize)> = found.collect();
        // Of functions of one signature the last counts: a text may have the library's own again.
        let Some(best) = found.iter().min_by_key(|(far, n)| (*far, Reverse(*n))).copied() else {
            if let Some(each) = self.of_each(name, &given)? {
                return Ok(each);
            }
            let types: Vec<String> = given.iter().map(|x| self.spelled(x.of)).collect();
            return self.error(format!("there is no `{name}` of ({})", types.join(", ")));
        };
        let same = |n: usize| self.unit.functions[n].signature().eq(self.unit.functions[best.1].signature());
        if found.iter().any(|&(far, n)| far == best.0 && !same(n)) {
            return self.error(format!("several `{name}` suit as well"));
        }
        let function = &self.unit.functions[best.1];
        let types: Vec<Type> = function.signature().collect();
        let result = function.result;
        let fixed = function.variables[..function.params].iter().zip(&given);
        if let Some((v, _)) =
            fixed.into_iter().find(|(v, x)| v.constant && !matches!(x.kind, ExprKind::Int(_)))
        {
            return self.error(format!("`{}` of `{name}` is a number that is written", v.name));
        }
        let given = given.into_iter().zip(types).map(|(x, of)| self.convert(x, of)).collect::<Result<_>>()?;
        Ok(Expr { of: result, kind: ExprKind::Call(best.1, given) })
    }

    /// A function of floats that has adjacent ones, and single ones for as many alike.
    fn of_each(&self, name: &str, given: &[Expr]) -> Result<Option<Expr>> {
        let Some(of) = given.iter().map(|x| x.of).find(|of| matches!(of, Type::Floats(_))) else {
            return Ok(None);
        };
        let float = |of: Type| matches!(of, Type::Number(Number::F32 | Number::Wide));
        let suits = |f: &Function| {
            f.name == name && f.params == given.len() && f.signature().all(float) && float(f.result)
        };
        let Some(function) = self.unit.functions.iter().rposition(suits) else { return Ok(None) };
        let given = given.iter().map(|x| self.convert(x.clone(), of)).collect::<Result<_>>()?;
        Ok(Some(Expr { of, kind: ExprKind::Each(function, given) }))
    }

    fn spelled(&self, of: Type) -> String {
        match of {
            Type::Void => "void".into(),
            Type::Number(of) => of.name().into(),
            Type::Floats(width) => format!("floats{width}"),
            Type::Pointer { to, constant, shared } => {
                let space = if shared { "shared " } else { "" };
                format!("{}{space}{} *", if constant { "const " } else { "" }, to.name())
            }
            Type::Array(of, length) => format!("{}[{length}]", of.name()),
            Type::Struct(n) => self.unit.structs[n].name.clone(),
        }
    }

    fn truth(&self, x: Expr) -> Result<Expr> {
        self.convert(x, number(Number::Bool))
    }

    /// The same of another type, where C would convert it by itself.
    fn convert(&self, x: Expr, of: Type) -> Result<Expr> {
        if x.of == of {
            return Ok(x);
        }
        match distance(&x, of) {
            None => self.error(format!("{} in the place of {}", self.spelled(x.of), self.spelled(of))),
            Some(_) if matches!(of, Type::Pointer { .. }) && matches!(x.kind, ExprKind::Int(0)) => {
                Ok(Expr { of, kind: ExprKind::Null })
            }
            Some(_) => Ok(Expr { of, kind: ExprKind::Convert(Box::new(x), false) }),
        }
    }
}

/// How far a value is from a type: 0 where it has it, `None` where it cannot have it.
fn distance(from: &Expr, to: Type) -> Option<u32> {
    match (from.of, to) {
        (a, b) if a == b => Some(0),
        (
            Type::Pointer { to: a, constant: false, shared: own },
            Type::Pointer { to: b, constant: true, shared },
        ) if a == b && own == shared => Some(1),
        (Type::Number(Number::F32), Type::Floats(_)) => Some(5),
        (Type::Number(_), Type::Pointer { .. }) if matches!(from.kind, ExprKind::Int(0)) => Some(4),
        (Type::Number(a), Type::Number(b)) if a != Number::Bf16 && b != Number::Bf16 => {
            Some(if promoted(a) == b { 2 } else { 3 })
        }
        _ => None,
    }
}
