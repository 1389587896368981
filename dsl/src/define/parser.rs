//! From the text of a definition to its tree.
//!
//! *In*: the lines between the braces of a `define`. *Out*: statements; every mistake is reported
//! at its token, and reading goes on at the next statement. Line ends mean nothing to a statement
//! that is right; after a mistake they say where the next one begins.

use super::syntax::*;
use crate::ast::{Arith, ArithKind};
use crate::diagnostic::Diagnostic;
use crate::keys::Type;
use crate::source::Span;
use crate::{ast, dream};

/// The deepest nesting of calls and parentheses.
const MAX_NESTING: usize = 48;
/// Terms of one sum or product.
const MAX_TERMS: usize = 64;
/// Tokens of one definition.
const MAX_TOKENS: usize = 20_000;

/// The signs of the language, longer ones first.
const SIGNS: [&str; 20] =
    ["==", "!=", "<=", ">=", "<", ">", "=", "+", "-", "*", "/", "(", ")", "[", "]", "{", "}", ",", ":", "."];

/// Words whose operands follow without a sign, apart from words that begin weights.
const WORDS: [&str; 3] = ["over", "along", "at"];

/// Help where no statement begins.
const STATEMENT: &str =
    "a statement is `name = value`, `recurrence S [dims] { … }`, `loss value` or `return value`";

/// The statements of a definition. `at` turns an offset of the text into one of the source.
pub(crate) fn body(text: &str, at: &dyn Fn(usize) -> usize, found: &mut Vec<Diagnostic>) -> Vec<Statement> {
    let tokens = tokens(text);
    if tokens.len() > MAX_TOKENS {
        let end = Span::new(at(0), at(text.len()));
        let error = Diagnostic::error("too-large", "this definition is too long").on(end);
        found.push(
            error.help(format!("at most {MAX_TOKENS} words and signs are read: make it several definitions")),
        );
        return Vec::new();
    }
    let mut parser = Parser { text, at, tokens, place: 0, depth: 0, found };
    parser.statements(false)
}

/// Arithmetic of a specification as an expression of a definition.
pub(crate) fn arithmetic(arith: &Arith) -> Expr {
    let inner = |arith: &Arith| Box::new(arithmetic(arith));
    let kind = match &arith.kind {
        ArithKind::Literal(text) => ExprKind::Number(text.clone()),
        ArithKind::Name(name) => ExprKind::Name(name.clone()),
        ArithKind::Negate(a) => ExprKind::Negate(inner(a)),
        ArithKind::Group(a) => ExprKind::Group(inner(a)),
        ArithKind::Invalid => ExprKind::Invalid,
        ArithKind::Binary(operator, a, b) => {
            let operator = match operator {
                ast::Operator::Add => Operator::Add,
                ast::Operator::Subtract => Operator::Subtract,
                ast::Operator::Multiply => Operator::Multiply,
                ast::Operator::Divide => Operator::Divide,
            };
            ExprKind::Binary(operator, inner(a), inner(b))
        }
    };
    Expr { kind, span: arith.span }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Name,
    Number,
    Sign,
    Unknown,
    End,
}

#[derive(Clone, Copy, Debug)]
struct Token<'t> {
    kind: Kind,
    text: &'t str,
    start: usize,
    /// Whether it is the first of its line.
    first: bool,
}

fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    let (mut place, mut first) = (0, true);
    while let Some(letter) = text[place..].chars().next() {
        let rest = &text[place..];
        if letter == '\n' {
            first = true;
        }
        if letter.is_whitespace() || letter == '\u{feff}' {
            place += letter.len_utf8();
            continue;
        }
        if rest.starts_with("//") {
            place += rest.find('\n').unwrap_or(rest.len());
            continue;
        }
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let (kind, length) = if letter.is_ascii_alphabetic() || letter == '_' {
            (Kind::Name, rest.find(|c| !word(c)).unwrap_or(rest.len()))
        } else if letter.is_ascii_digit() {
            (Kind::Number, number_length(rest))
        } else if let Some(sign) = SIGNS.iter().find(|sign| rest.starts_with(**sign)) {
            (Kind::Sign, sign.len())
        } else {
            (Kind::Unknown, letter.len_utf8())
        };
        tokens.push(Token { kind, text: &rest[..length], start: place, first });
        (place, first) = (place + length, false);
    }
    tokens.push(Token { kind: Kind::End, text: "", start: text.trim_end().len(), first: true });
    tokens
}

/// The bytes of the number that a text begins with: `128_256`, `1e-3`, `0.5%`.
fn number_length(text: &str) -> usize {
    let bytes = text.as_bytes();
    let is = |place: usize, of: fn(&u8) -> bool| bytes.get(place).is_some_and(of);
    let digits = |mut place: usize| {
        while is(place, |b| b.is_ascii_alphanumeric() || *b == b'_')
            && !is(place, |b| matches!(b, b'e' | b'E'))
        {
            place += 1;
        }
        place
    };
    let mut end = digits(0);
    if is(end, |b| *b == b'.') && is(end + 1, u8::is_ascii_digit) {
        end = digits(end + 1);
    }
    if is(end, |b| matches!(b, b'e' | b'E')) {
        let sign = usize::from(is(end + 1, |b| matches!(b, b'+' | b'-')));
        end = digits(end + 1 + sign);
    }
    end + usize::from(is(end, |b| *b == b'%'))
}

struct Parser<'a> {
    text: &'a str,
    at: &'a dyn Fn(usize) -> usize,
    tokens: Vec<Token<'a>>,
    place: usize,
    depth: usize,
    found: &'a mut Vec<Diagnostic>,
}

/// A mistake that was reported: reading goes on at the next statement.
struct Slip;

type Read<T> = Result<T, Slip>;

impl<'a> Parser<'a> {
    // Tokens --------------------------------------------------------------------------------------

    fn peek(&self) -> Token<'a> {
        self.tokens[self.place.min(self.tokens.len() - 1)]
    }

    fn after(&self) -> Token<'a> {
        self.tokens[(self.place + 1).min(self.tokens.len() - 1)]
    }

    fn take(&mut self) -> Token<'a> {
        let token = self.peek();
        self.place = (self.place + 1).min(self.tokens.len() - 1);
        token
    }

    fn is(&self, sign: &str) -> bool {
        self.peek().kind == Kind::Sign && self.peek().text == sign
    }

    fn takes(&mut self, sign: &str) -> bool {
        let is = self.is(sign);
        if is {
            self.take();
        }
        is
    }

    fn span(&self, token: Token) -> Span {
        match token.kind {
            // A sign that is missing at the end is missing after the last word.
            Kind::End => {
                let end = (self.at)(token.start.saturating_sub(1));
                Span::new(end, end + 1)
            }
            _ => Span::new((self.at)(token.start), (self.at)(token.start) + token.text.len()),
        }
    }

    fn error(&mut self, token: Token, message: impl Into<String>, help: impl Into<String>) -> Slip {
        let error = Diagnostic::error("syntax", message).on(self.span(token)).help(help);
        self.found.push(error);
        Slip
    }

    /// The token as a reader calls it.
    fn called(token: Token) -> String {
        match token.kind {
            Kind::End => "the end".into(),
            _ => format!("`{}`", token.text),
        }
    }

    fn name(&mut self, role: &str) -> Read<Name> {
        let token = self.peek();
        if token.kind != Kind::Name {
            let message = format!("{} stands where {role} should be", capital(&Self::called(token)));
            return Err(self.error(
                token,
                message,
                "a name has letters, digits and `_`, and begins with a letter",
            ));
        }
        self.take();
        Ok(Name { text: token.text.into(), span: self.span(token) })
    }

    fn expect(&mut self, sign: &str, help: &str) -> Read<()> {
        if self.takes(sign) {
            return Ok(());
        }
        let token = self.peek();
        let message = format!("{} stands where `{sign}` should be", capital(&Self::called(token)));
        Err(self.error(token, message, help))
    }

    // Statements ----------------------------------------------------------------------------------

    fn statements(&mut self, inside: bool) -> Vec<Statement> {
        let mut statements = Vec::new();
        loop {
            let token = self.peek();
            if token.kind == Kind::End || (inside && self.is("}")) {
                return statements;
            }
            let before = self.place;
            match self.statement() {
                Ok(statement) => statements.push(statement),
                Err(Slip) => {
                    self.recover(before);
                    statements.extend(self.stand_in(token, before));
                }
            }
        }
    }

    /// A statement in the place of one that cannot be read, so that its name is known below.
    fn stand_in(&self, token: Token, place: usize) -> Option<Statement> {
        let next = self.tokens.get(place + 1)?;
        let invalid = Expr { kind: ExprKind::Invalid, span: self.span(token) };
        if token.kind == Kind::Name && token.text == "return" {
            return Some(Statement::Return(invalid));
        }
        let assigns = token.kind == Kind::Name && next.kind == Kind::Sign && next.text == "=";
        assigns.then(|| Statement::Assign(Name { text: token.text.into(), span: self.span(token) }, invalid))
    }

    fn begins_statement(&self) -> bool {
        let (token, next) = (self.peek(), self.after());
        let assigns = next.kind == Kind::Sign && next.text == "=";
        token.kind == Kind::Name && (matches!(token.text, "return" | "recurrence" | "loss") || assigns)
    }

    /// Goes on at the next line that begins a statement, or where a group ends.
    fn recover(&mut self, before: usize) {
        self.depth = 0;
        if self.place == before {
            self.take();
        }
        let mut open = 0usize;
        loop {
            let token = self.peek();
            let begins = token.first && self.begins_statement();
            if token.kind == Kind::End || begins || (open == 0 && self.is("}")) {
                return;
            }
            match token.text {
                "{" => open += 1,
                "}" => open -= 1,
                _ => {}
            }
            self.take();
        }
    }

    fn statement(&mut self) -> Read<Statement> {
        let (token, next) = (self.peek(), self.after());
        if self.begins_statement() && next.text == "=" {
            let name = self.name("a name")?;
            self.take();
            return Ok(Statement::Assign(name, self.expression()?));
        }
        match (token.kind, token.text) {
            (Kind::Name, "return") => {
                self.take();
                Ok(Statement::Return(self.expression()?))
            }
            (Kind::Name, "loss") => {
                self.take();
                Ok(Statement::Loss(self.expression()?))
            }
            (Kind::Name, "recurrence") => self.recurrence().map(Statement::Recurrence),
            (Kind::Name, _) if next.text == ":" => {
                let help = format!("write `{} = …`", token.text);
                Err(self.error(next, "a value gets its name by `=`", help))
            }
            (Kind::Name, "let") => {
                let help = "take `let` away: `name = value`";
                Err(self.error(token, "a value of a definition has no `let`", help))
            }
            (Kind::Name, name) if next.text == "(" => {
                let message = format!("the result of `{name}` gets no name");
                Err(self.error(token, message, format!("write `y = {name}(…)`, or `return {name}(…)`")))
            }
            (Kind::Sign, "}") => Err(self.error(token, "this `}` closes nothing", "take one away")),
            (Kind::Unknown, "#") => {
                Err(self.error(token, "`#` begins no comment", "a comment begins with `//`"))
            }
            (Kind::Unknown, ";") => {
                self.take();
                Err(self.error(token, "a statement ends with its line, without `;`", "take it away"))
            }
            _ => {
                let message = format!("{} stands where a statement should be", capital(&Self::called(token)));
                Err(self.error(token, message, STATEMENT))
            }
        }
    }

    fn recurrence(&mut self) -> Read<Recurrence> {
        let span = self.span(self.peek());
        self.take();
        let mut states = Vec::new();
        loop {
            let name = self.name("the name of a state")?;
            let dims = if self.is("[") { self.dims()? } else { Vec::new() };
            let from = match self.peek() {
                Token { kind: Kind::Name, text: "from", .. } => {
                    self.take();
                    Some(self.operand(false)?)
                }
                _ => None,
            };
            states.push(State { name, dims, from });
            if !self.takes(",") {
                break;
            }
        }
        let open = self.peek();
        self.expect("{", "write `recurrence S [dims] { … }`, several states with `,` between them")?;
        let body = self.statements(true);
        if !self.takes("}") {
            return Err(self.error(open, "this `{` is not closed", "add `}`"));
        }
        Ok(Recurrence { states, body, span })
    }

    // Expressions ---------------------------------------------------------------------------------

    fn expression(&mut self) -> Read<Expr> {
        let value = self.binary(1)?;
        let token = self.peek();
        let ends =
            token.first || (token.kind == Kind::Sign && matches!(token.text, "," | ")" | "]" | "}" | "{"));
        if ends || self.begins_statement() {
            return Ok(value);
        }
        let help = match token.text {
            "%" => "write `mod(a, b)`",
            "^" => "write `square(v)`, or `exp(p * log(v))`",
            "@" => "write `dot(a, b, over d)`, or `linear(v, [dims])`",
            "&" | "|" => "write `and` or `or`",
            "?" => "write `where(c, a, b)`",
            "=" => "equality is `==`",
            ";" => "a statement ends with its line",
            "." => "`component.value` is a value of another component",
            _ => "write an operator before it, or begin the next statement on a line of its own",
        };
        let message = format!("{} does not belong here", capital(&Self::called(token)));
        Err(self.error(token, message, help))
    }

    fn operator(&self) -> Option<Operator> {
        let token = self.peek();
        let of = |operator: &Operator| operator.sign() == token.text;
        let word = token.kind == Kind::Name && matches!(token.text, "and" | "or");
        (word || token.kind == Kind::Sign).then(|| Operator::ALL.into_iter().find(of)).flatten()
    }

    fn binary(&mut self, least: u8) -> Read<Expr> {
        let mut left = self.unary(true)?;
        let mut terms = 1;
        while let Some(operator) = self.operator().filter(|operator| operator.strength() >= least) {
            let sign = self.take();
            terms += 1;
            if terms > MAX_TERMS {
                let help = format!("at most {MAX_TERMS} terms are read: give parts of it names");
                return Err(self.error(sign, "this expression is too long", help));
            }
            let next = self.peek();
            if next.kind == Kind::End || (next.first && self.begins_statement()) {
                let message = format!("a value is missing after `{}`", sign.text);
                return Err(self.error(sign, message, "write one, or take the sign away"));
            }
            let right = self.binary(operator.strength() + 1)?;
            let kind = ExprKind::Binary(operator, Box::new(left), Box::new(right));
            left = Expr { kind, span: self.span(sign) };
        }
        Ok(left)
    }

    /// An operand of a word such as `over`: products without sums.
    fn operand(&mut self, keys: bool) -> Read<Expr> {
        let mut left = self.unary(keys)?;
        while let Some(operator) = self.operator().filter(|o| o.strength() >= Operator::Multiply.strength()) {
            let sign = self.take();
            let right = self.unary(keys)?;
            let kind = ExprKind::Binary(operator, Box::new(left), Box::new(right));
            left = Expr { kind, span: self.span(sign) };
        }
        Ok(left)
    }

    fn unary(&mut self, keys: bool) -> Read<Expr> {
        let token = self.peek();
        self.depth += 1;
        if self.depth > MAX_NESTING {
            let help = format!("at most {MAX_NESTING} levels are read: give inner values names");
            return Err(self.error(token, "this is nested too deep", help));
        }
        let value = match (token.kind, token.text) {
            (Kind::Sign, "-") => {
                self.take();
                let kind = ExprKind::Negate(Box::new(self.unary(keys)?));
                Expr { kind, span: self.span(token) }
            }
            (Kind::Name, "not") => {
                self.take();
                let kind = ExprKind::Not(Box::new(self.binary(Operator::Less.strength())?));
                Expr { kind, span: self.span(token) }
            }
            _ => self.postfix(keys)?,
        };
        self.depth -= 1;
        Ok(value)
    }

    fn postfix(&mut self, keys: bool) -> Read<Expr> {
        let mut value = self.atom(keys)?;
        // An index stands in the same line as its value.
        while self.is("[") && !self.peek().first {
            let open = self.take();
            let mut places = Vec::new();
            while !self.is("]") {
                places.push(self.expression()?);
                if !self.takes(",") {
                    break;
                }
            }
            if !self.takes("]") {
                return Err(self.error(open, "this `[` is not closed", "add `]`"));
            }
            let span = value.span;
            value = Expr { kind: ExprKind::Index(Box::new(value), places), span };
        }
        Ok(value)
    }

    fn atom(&mut self, keys: bool) -> Read<Expr> {
        let (token, next) = (self.peek(), self.after());
        let kind = match token.kind {
            Kind::Number => ExprKind::Number(self.take().text.into()),
            Kind::Name if next.text == "(" && next.kind == Kind::Sign && !next.first => {
                ExprKind::Call(self.call(keys)?)
            }
            Kind::Name if next.text == "." && next.kind == Kind::Sign => {
                let of = self.name("a component")?;
                self.take();
                ExprKind::Value(of, self.name("the name of a value")?)
            }
            Kind::Name => ExprKind::Name(self.take().text.into()),
            Kind::Sign if token.text == "(" => {
                self.take();
                let inner = self.expression()?;
                if !self.takes(")") {
                    return Err(self.error(token, "this `(` is not closed", "add `)`"));
                }
                ExprKind::Group(Box::new(inner))
            }
            Kind::Sign if token.text == "[" => {
                let help = "dimensions stand in brackets as an argument of a function: `linear(x, [heads])`";
                return Err(self.error(token, "dimensions stand where a value should be", help));
            }
            Kind::Sign | Kind::Unknown | Kind::End => {
                let message = format!("{} stands where a value should be", capital(&Self::called(token)));
                let help = match token.text {
                    "*" => "a power is `square(v)`, or `exp(p * log(v))`",
                    _ => "write a number, a name, or a function of values",
                };
                return Err(self.error(token, message, help));
            }
        };
        Ok(Expr { kind, span: self.span(token) })
    }

    fn call(&mut self, keys: bool) -> Read<Call> {
        let name = self.name("a function")?;
        let open = self.take();
        let mut arguments = Vec::new();
        while !self.is(")") {
            if self.peek().kind == Kind::End
                || (self.peek().first && self.begins_statement() && !self.named_argument())
            {
                return Err(self.error(open, "this `(` is not closed", "add `)`"));
            }
            arguments.push(self.argument()?);
            if !self.takes(",") {
                break;
            }
        }
        if !self.is(")") {
            let token = self.peek();
            if token.first || token.kind == Kind::End {
                return Err(self.error(open, "this `(` is not closed", "add `)`"));
            }
            let message = format!("{} does not belong here", capital(&Self::called(token)));
            return Err(self.error(token, message, "arguments stand with `,` between them"));
        }
        self.take();
        let keys = if keys && self.is("{") { Some(self.keys(&name)?) } else { None };
        Ok(Call { name, arguments, keys })
    }

    /// Whether the words from here on are an argument `score = …` and no statement.
    fn named_argument(&self) -> bool {
        matches!(self.peek().text, "score" | "mask" | "window" | "scale" | "dropout" | "eps")
    }

    /// The keys of a component, as the specification has them.
    fn keys(&mut self, name: &Name) -> Read<ast::Map> {
        let open = self.peek();
        let mut around = 0usize;
        loop {
            let token = self.take();
            match (token.kind, token.text) {
                (Kind::End, _) => return Err(self.error(open, "this `{` is not closed", "add `}`")),
                (Kind::Sign, "{") => around += 1,
                (Kind::Sign, "}") => around -= 1,
                _ => {}
            }
            if around == 0 {
                let text = &self.text[open.start..token.start + 1];
                let outer = self.at;
                let at = |offset: usize| outer(open.start + offset);
                let kind = Type::Component.child(&name.text);
                return Ok(dream::read_keys(text, &at, kind, self.found));
            }
        }
    }

    fn argument(&mut self) -> Read<Argument> {
        let (token, next) = (self.peek(), self.after());
        let span = self.span(token);
        let kind = if self.is("[") {
            ArgumentKind::Dims(self.dims()?)
        } else if token.kind == Kind::Name && next.kind == Kind::Sign && next.text == "=" {
            let name = self.name("a name")?;
            self.take();
            ArgumentKind::Named(name, self.expression()?)
        } else if token.kind == Kind::Name && Self::is_word(token, next) {
            let name = self.name("a word")?;
            let mut operands = Vec::new();
            let ends = |own: &Self| {
                let begins = own.peek().first && own.begins_statement();
                begins || own.is(",") || own.is(")") || own.is("[") || own.peek().kind == Kind::End
            };
            while !ends(self) {
                operands.push(self.operand(true)?);
            }
            ArgumentKind::Word(name, operands)
        } else {
            ArgumentKind::Value(self.expression()?)
        };
        Ok(Argument { kind, span })
    }

    /// Whether a name is a word whose operands follow.
    fn is_word(token: Token, next: Token) -> bool {
        let init =
            super::functions::INITS.iter().any(|(word, numbers, _)| *word == token.text && *numbers > 0);
        let follows = match next.kind {
            Kind::Name => !matches!(next.text, "and" | "or"),
            Kind::Number => true,
            Kind::Sign => init && next.text == "-" || WORDS.contains(&token.text) && next.text == "(",
            Kind::Unknown | Kind::End => false,
        };
        follows && !(next.first && !init && !WORDS.contains(&token.text))
    }

    fn dims(&mut self) -> Read<Vec<DimExpr>> {
        let open = self.take();
        let mut dims = Vec::new();
        while !self.is("]") {
            let token = self.peek();
            if token.kind == Kind::Number {
                let help = format!("give it a name: `[size: {}]`, or a setting", token.text);
                return Err(self.error(token, "a dimension has no name", help));
            }
            let name = self.name("the name of a dimension")?;
            let size = if self.takes(":") { Some(self.expression()?) } else { None };
            dims.push(DimExpr { name, size });
            if !self.takes(",") {
                break;
            }
        }
        if self.takes("]") {
            return Ok(dims);
        }
        let token = self.peek();
        if token.kind == Kind::Name && !token.first {
            let message = format!("`{}` does not belong here", token.text);
            return Err(self.error(
                token,
                message,
                "dimensions stand with `,` between them: `[heads, size]`",
            ));
        }
        Err(self.error(open, "this `[` is not closed", "add `]`"))
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
