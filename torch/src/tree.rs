//! A small tree of Python, and its text.
//!
//! *In*: nothing of a model. *Out*: lines of at most [`WIDTH`] columns where they can be broken.

/// Columns of a line.
pub const WIDTH: usize = 100;

/// An expression.
#[derive(Clone, Debug, PartialEq)]
pub enum Expr {
    /// A name, or anything that binds as tightly.
    Atom(String),
    /// `-x`
    Neg(Box<Expr>),
    /// `a + b` of an operator.
    Infix(&'static str, Box<Expr>, Box<Expr>),
    /// `f(x, …)`
    Call(Box<Expr>, Vec<Expr>),
    /// `x.name`
    Attribute(Box<Expr>, String),
    /// `x[…]`
    Index(Box<Expr>, String),
    /// `name=x`, an argument.
    Keyword(&'static str, Box<Expr>),
    /// `lambda …: x`, an argument.
    Lambda(&'static str, Box<Expr>),
}

/// How tightly it binds.
fn strength(e: &Expr) -> u8 {
    match e {
        Expr::Keyword(..) | Expr::Lambda(..) => 0,
        Expr::Infix("<" | "<=" | "==" | ">", ..) => 1,
        Expr::Infix("+" | "-", ..) => 2,
        Expr::Infix(..) => 3,
        Expr::Neg(_) => 4,
        Expr::Atom(text) if text.starts_with('-') => 4,
        Expr::Atom(_) | Expr::Call(..) | Expr::Attribute(..) | Expr::Index(..) => 5,
    }
}

impl Expr {
    /// A name.
    pub fn name(text: impl Into<String>) -> Expr {
        Expr::Atom(text.into())
    }

    /// A number.
    pub fn number(x: f64) -> Expr {
        Expr::Atom(match x {
            x if x == f64::INFINITY => "math.inf".into(),
            x if x == f64::NEG_INFINITY => "-math.inf".into(),
            x => format!("{x:?}"),
        })
    }

    /// `a op b`
    pub fn infix(op: &'static str, a: Expr, b: Expr) -> Expr {
        Expr::Infix(op, Box::new(a), Box::new(b))
    }

    /// `f(x, …)` of a function by name.
    pub fn call(f: &str, args: Vec<Expr>) -> Expr {
        Expr::Call(Box::new(Expr::name(f)), args)
    }

    /// `x.f(…)`
    pub fn method(self, f: &str, args: Vec<Expr>) -> Expr {
        Expr::Call(Box::new(self.attribute(f)), args)
    }

    /// `x.name`
    pub fn attribute(self, name: &str) -> Expr {
        Expr::Attribute(Box::new(self), name.into())
    }

    /// `x[at]`
    pub fn index(self, at: impl Into<String>) -> Expr {
        Expr::Index(Box::new(self), at.into())
    }

    /// `name=x`
    pub fn keyword(name: &'static str, x: Expr) -> Expr {
        Expr::Keyword(name, Box::new(x))
    }

    /// Whether it may be written twice.
    pub fn is_atom(&self) -> bool {
        matches!(self, Expr::Atom(_))
            || matches!(self, Expr::Attribute(x, _) if x.is_atom())
            || matches!(self, Expr::Index(x, _) if matches!(**x, Expr::Attribute(..)) && x.is_atom())
    }

    /// Its text in one line.
    pub fn text(&self) -> String {
        let within = |e: &Expr, least: u8| match strength(e) < least {
            true => format!("({})", e.text()),
            false => e.text(),
        };
        match self {
            Expr::Atom(text) => text.clone(),
            Expr::Neg(x) => format!("-{}", within(x, 4)),
            Expr::Infix(op, a, b) => {
                let own = strength(self);
                // `a - (b + c)` and `a / (b · c)` keep their parentheses.
                let right = if matches!(*op, "+" | "*") { own } else { own + 1 };
                format!("{} {op} {}", within(a, own), within(b, right))
            }
            Expr::Call(f, args) => {
                let args: Vec<String> = args.iter().map(Expr::text).collect();
                format!("{}({})", within(f, 5), args.join(", "))
            }
            Expr::Attribute(x, name) => format!("{}.{name}", within(x, 5)),
            Expr::Index(x, at) => format!("{}[{at}]", within(x, 5)),
            Expr::Keyword(name, x) => format!("{name}={}", x.text()),
            Expr::Lambda(args, x) => format!("lambda {args}: {}", x.text()),
        }
    }
}

/// A statement.
#[derive(Clone, Debug, PartialEq)]
pub enum Stmt {
    /// `a, b = x  # comment`
    Assign(Vec<String>, Expr, String),
    /// `return a, b`
    Return(Vec<Expr>),
    /// A header that ends in a colon, and what stands below it.
    Block(String, Vec<Stmt>),
    /// Any line.
    Line(String),
}

/// Lines of statements, so far indented.
pub fn lines(stmts: &[Stmt], indent: usize, out: &mut String) {
    let pad = " ".repeat(indent);
    for stmt in stmts {
        match stmt {
            Stmt::Assign(names, x, comment) => {
                let comment = if comment.is_empty() { String::new() } else { format!("  # {comment}") };
                let head = format!("{pad}{} = ", names.join(", "));
                out.push_str(&broken(&head, x, &comment, indent));
            }
            Stmt::Return(values) if values.len() == 1 => {
                out.push_str(&broken(&format!("{pad}return "), &values[0], "", indent));
            }
            Stmt::Return(values) => {
                let values: Vec<String> = values.iter().map(Expr::text).collect();
                out.push_str(&format!("{pad}return {}\n", values.join(", ")));
            }
            Stmt::Block(header, body) => {
                out.push_str(&format!("{pad}{header}:\n"));
                lines(body, indent + 4, out);
            }
            Stmt::Line(text) if text.is_empty() => out.push('\n'),
            Stmt::Line(text) => out.push_str(&format!("{pad}{text}\n")),
        }
    }
}

/// A line, or a call with its arguments in a line of their own where it is too long.
fn broken(head: &str, x: &Expr, comment: &str, indent: usize) -> String {
    let plain = format!("{head}{}", x.text());
    // A comment that does not fit is left out.
    let comment = if plain.chars().count() + comment.chars().count() > WIDTH { "" } else { comment };
    let whole = format!("{plain}{comment}\n");
    let (f, args, rest) = match x {
        Expr::Call(f, args) => (f, args, String::new()),
        Expr::Index(x, at) => match &**x {
            Expr::Call(f, args) => (f, args, format!("[{at}]")),
            _ => return whole,
        },
        _ => return whole,
    };
    let chained = args.len() < 2 && matches!(**f, Expr::Attribute(..));
    if whole.chars().count() <= WIDTH + 1 || args.is_empty() || chained {
        return whole;
    }
    let pad = " ".repeat(indent);
    let each: Vec<String> = args.iter().map(Expr::text).collect();
    let inner = format!("{pad}    {}", each.join(", "));
    let body = match inner.chars().count() <= WIDTH {
        true => inner,
        false => each.iter().map(|arg| format!("{pad}    {arg},")).collect::<Vec<_>>().join("\n"),
    };
    format!("{head}{}(\n{body}\n{pad}){rest}\n", f.text())
}
