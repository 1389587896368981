"""Components that are written as formulas, computed from their text: `define` of docs/dev/definitions.md.

It reads the text itself and evaluates it expression by expression. A value is an array with axes before its own dimensions:
`[b, t, …]` outside of scores, `[b, i, j, …]` in a score, of size 1 where the value is the same for all.

    known = library(text)                                # {name: Definition}
    bound = known["gla"].bind({"heads": 2}, hidden=8)    # numbers of all settings
    y = Evaluation(bound, ask, context).run(x)           # ask(path, purpose, shape, init) -> the weight
"""

import re
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

# --- The text -----------------------------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"(?P<space>[ \t\r]+|//[^\n]*)|(?P<line>\n)|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign><=|>=|==|!=|[-+*/<>=()\[\]{},:.])"
)
# Words before operands that no comma separates.
WORDS = ("over", "along", "at", "normal", "uniform", "ramp", "log_uniform", "inverse_softplus_uniform")


def tokens_of(text):
    """(kind, text) of every token; the end of a line counts outside of brackets only."""
    found, at, open_brackets = [], 0, []
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise ValueError(f"no token: {text[at : at + 20]!r}")
        at, kind = match.end(), match.lastgroup
        if kind == "space" or kind == "line" and open_brackets and open_brackets[-1] != "{":
            continue
        word = match[0]
        if word in ("(", "[", "{"):
            open_brackets.append(word)
        elif word in (")", "]", "}"):
            open_brackets.pop()
        found.append((kind, word))
    return found


@dataclass
class Call:
    name: str
    values: list = field(default_factory=list)
    named: dict = field(default_factory=dict)
    words: dict = field(default_factory=dict)
    dims: list = None  # (name, size or None) in brackets
    keys: dict = None  # of a component


class Reader:
    """Expressions are numbers, names, ("-", a), ("not", a), (operator, a, b), ("index", name, places), ("of", component, value)
    and calls."""

    LEVELS = [("or",), ("and",), ("<", "<=", ">", ">=", "==", "!="), ("+", "-"), ("*", "/")]

    def __init__(self, text):
        self.tokens, self.at = tokens_of(text), 0

    def peek(self, ahead=0):
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else None

    def kind(self):
        return self.tokens[self.at][0] if self.at < len(self.tokens) else None

    def take(self, expected=None):
        word = self.peek()
        if word is None or expected not in (None, word):
            raise ValueError(f"{expected!r} expected, found {word!r}")
        self.at += 1
        return word

    def lines(self):
        while self.kind() == "line":
            self.at += 1

    def expression(self, level=0):
        if level == len(self.LEVELS):
            return self.unary()
        left = self.expression(level + 1)
        while self.peek() in self.LEVELS[level]:
            operator = self.take()
            left = (operator, left, self.expression(level + 1))
        return left

    def unary(self):
        if self.peek() in ("-", "not"):
            return (self.take(), self.unary())
        return self.atom()

    def atom(self):
        kind, word = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            return float(word) if re.search("[.eE]", word) else int(word)
        if word == "(":
            inside = self.expression()
            self.take(")")
            return inside
        assert kind == "name", f"a value expected, found {word!r}"
        if self.peek() == "(":
            return self.call(word)
        if self.peek() == "[":
            self.take()
            places = [self.expression()]
            while self.peek() == ",":
                self.take()
                places.append(self.expression())
            self.take("]")
            return ("index", word, places)
        if self.peek() == ".":
            self.take()
            return ("of", word, self.take())
        return word

    def call(self, name):
        call = Call(name)
        self.take("(")
        while self.peek() != ")":
            if self.peek() == "[":
                call.dims = self.dims()
            elif self.kind() == "name" and self.peek(1) == "=":
                key = self.take()
                self.take("=")
                call.named[key] = self.expression()
            elif self.peek() in WORDS and self.peek(1) not in (",", ")"):
                word, call_words = self.take(), []
                while self.peek() not in (",", ")"):
                    call_words.append(self.unary())
                call.words[word] = call_words
            else:
                call.values.append(self.expression())
            if self.peek() != ")":
                self.take(",")
        self.take(")")
        if self.peek() == "{":
            self.take()
            call.keys = {}
            self.lines()
            while self.peek() != "}":
                key = self.take()
                call.keys[key] = self.expression()
                self.lines()
            self.take("}")
        return call

    def dims(self):
        self.take("[")
        found = []
        while self.peek() != "]":
            name = self.take()
            size = None
            if self.peek() == ":":
                self.take()
                size = self.expression()
            found.append((name, size))
            if self.peek() != "]":
                self.take(",")
        self.take("]")
        return found

    def statements(self):
        """Up to the closing brace."""
        found = []
        self.lines()
        while self.peek() not in ("}", None):
            if self.peek() == "return":
                self.take()
                found.append(("return", self.expression()))
            elif self.peek() == "loss" and self.peek(1) != "=":
                self.take()
                found.append(("loss", self.expression()))
            elif self.peek() == "recurrence":
                self.take()
                states = []
                while True:
                    name, dims, start = self.take(), [], 0
                    if self.peek() == "[":
                        dims = self.dims()
                    if self.peek() == "from":
                        self.take()
                        start = self.expression()
                    states.append((name, dims, start))
                    if self.peek() != ",":
                        break
                    self.take()
                self.take("{")
                found.append(("recurrence", states, self.statements()))
                self.take("}")
            else:
                name = self.take()
                self.take("=")
                found.append(("assign", name, self.expression()))
            self.lines()
        return found

    def settings(self):
        found = {}
        while self.peek() not in (")", None):
            name, default = self.take(), None
            if self.peek() not in (",", ")", None):
                if self.peek() == "=":
                    self.take()
                default = self.expression()
            found[name] = default
            if self.peek() == ",":
                self.take()
        return found


@dataclass
class Definition:
    name: str
    settings: dict  # name: default, an expression or None
    body: list

    def bind(self, given, hidden):
        """The number of every setting; `given` are those of a component."""
        assert set(given) <= set(self.settings), f"{self.name}: {given}"
        numbers = {"hidden": hidden}
        for name, default in self.settings.items():
            written = given.get(name, default)
            assert written is not None, f"{self.name}: {name} has no number"
            read = Reader(str(written)).expression() if isinstance(written, str) else written
            numbers[name] = whole(arithmetic(read, numbers))
        return Bound(self, numbers)


@dataclass
class Bound:
    definition: Definition
    numbers: dict


def whole(number):
    return int(number) if float(number).is_integer() else float(number)


def arithmetic(expression, numbers):
    """A number from numbers."""
    if isinstance(expression, (int, float)):
        return expression
    if isinstance(expression, str):
        return numbers[expression]
    if isinstance(expression, Call):
        of = {"min": min, "max": max, "sqrt": np.sqrt, "floor": np.floor, "exp": np.exp, "log": np.log}
        return of[expression.name](*(arithmetic(value, numbers) for value in expression.values))
    operator, *sides = expression
    sides = [arithmetic(side, numbers) for side in sides]
    if len(sides) == 1:
        return -sides[0]
    a, b = sides
    return {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[operator]()


def library(text):
    """The definitions of a `.dream` file; what follows them is not read."""
    reader, found = Reader(text), {}
    reader.lines()
    while reader.peek() == "define":
        reader.take()
        name, settings = reader.take(), {}
        if reader.peek() == "(":
            reader.take()
            settings = reader.settings()
            reader.take(")")
        reader.take("{")
        found[name] = Definition(name, settings, reader.statements())
        reader.take("}")
        reader.lines()
    return found


def of_yaml(given):
    """`define:` of a specification in YAML."""
    return {
        name: Definition(
            name,
            {key: Reader(str(default)).expression() for key, default in (d.get("settings") or {}).items()},
            Reader(d["code"]).statements(),
        )
        for name, d in given.items()
    }


# --- The values ---------------------------------------------------------------------------------------------------------


@dataclass
class Value:
    dims: tuple  # names
    array: object  # axes of tokens, then one for each name


ELEMENTS = {
    "exp": jnp.exp, "log": jnp.log, "sqrt": jnp.sqrt, "rsqrt": lambda v: 1 / jnp.sqrt(v), "abs": jnp.abs,
    "square": lambda v: v * v, "sin": jnp.sin, "cos": jnp.cos, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid, "silu": jax.nn.silu, "gelu": lambda v: jax.nn.gelu(v, approximate=True),
    "relu": jax.nn.relu, "relu2": lambda v: jax.nn.relu(v) ** 2, "softplus": jax.nn.softplus, "floor": jnp.floor,
    "-": lambda v: -v, "not": lambda v: (v == 0) * 1.0,
}  # fmt: skip
PAIRS = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "min": jnp.minimum, "max": jnp.maximum, "mod": lambda a, b: a - b * jnp.floor(a / b),
    "<": lambda a, b: (a < b) * 1.0, "<=": lambda a, b: (a <= b) * 1.0, ">": lambda a, b: (a > b) * 1.0,
    ">=": lambda a, b: (a >= b) * 1.0, "==": lambda a, b: (a == b) * 1.0, "!=": lambda a, b: (a != b) * 1.0,
    "and": lambda a, b: ((a != 0) & (b != 0)) * 1.0, "or": lambda a, b: ((a != 0) | (b != 0)) * 1.0,
}  # fmt: skip


@dataclass
class Context:
    """What a definition reads beside its tokens."""

    depth: int = 0
    depths: int = 1
    passing: int = 0
    vocab: int = 1
    ids: object = None  # of the tokens [b, t]; zeros where there are none
    stop: object = jax.lax.stop_gradient
    earlier: dict = field(default_factory=dict)  # value's name -> of this component's last application
    others: dict = field(default_factory=dict)  # component's name -> {value's name: of its last application}
    along_depth: dict = field(default_factory=dict)  # number of a depth_attend -> [(keys, values)]


class Evaluation:
    """One application of a definition to all tokens."""

    def __init__(self, bound, ask, context):
        self.ask, self.context, self.body = ask, context, bound.definition.body
        self.numbers = dict(bound.numbers)
        self.sizes = {name: n for name, n in self.numbers.items() if isinstance(n, int)}
        self.label, self.paths = "", {}  # how weights are called
        self.names = {}
        self.axes = 2  # before the dimensions of a value
        self.score = None  # words of the score that is computed
        self.depth_attends = 0
        self.loss = 0.0  # of its own

    def run(self, x):
        self.names["x"] = Value(("hidden",), x)
        self.tokens = x.shape[:2]
        result = self.execute(self.body)
        assert set(result.dims) <= {"hidden"}, result.dims
        y = result.array if result.dims else result.array[..., None]
        return jnp.broadcast_to(y, x.shape)

    def execute(self, statements):
        for kind, what, *rest in statements:
            if kind == "return":
                self.label = "out"
                return self.value(what)
            if kind == "loss":
                self.label = "loss"
                loss = self.value(what)
                assert loss.dims == (), loss.dims
                self.loss += jnp.mean(loss.array)
            elif kind == "assign":
                self.label = what
                self.names[what] = self.value(rest[0])
            else:
                self.recurrence(what, rest[0])

    # Weights: named by the value that they are written in, numbered where there are several.

    def weight(self, kind, dims, init, purpose, inputs=0):
        path = f"{self.label}.{kind}"
        self.paths[path] = self.paths.get(path, 0) + 1
        if self.paths[path] > 1:
            path += str(self.paths[path])
        sizes = tuple(self.sizes[dim] for dim in dims)
        # A matrix is `[out, in]`, whatever dimensions its ends have; a number is a tensor of one.
        shape = sizes or (1,)
        if purpose == "matrix":
            shape = tuple(int(np.prod(part)) for part in (sizes[:-inputs], sizes[-inputs:]))
        made = self.ask(path, purpose, shape, init).reshape(sizes)
        return Value(tuple(dims), made.reshape((1,) * self.axes + sizes))

    def beginning(self, call):
        """How a weight begins: a word and its numbers, or None for the recipe's."""
        for word in WORDS[3:]:
            if word in call.words:
                return (word, *(arithmetic(n, self.numbers) for n in call.words[word]))
        for value in call.values[1 if call.name == "linear" else 0 :]:
            if value in ("zero", "one"):
                return ("constant", float(value == "one"))
            if value not in ("bias", "gain"):
                return ("constant", float(arithmetic(value, self.numbers)))
        return None

    # Dimensions

    def written(self, dims):
        for name, size in dims:
            if size is not None:
                size = whole(arithmetic(size, self.numbers))
                assert self.sizes.setdefault(name, size) == size, name
            assert name in self.sizes, f"no dimension {name}"
        return [name for name, _ in dims]

    def aligned(self, value, dims):
        """Its array with these dimensions, of size 1 where it has none."""
        order = [value.dims.index(dim) for dim in dims if dim in value.dims]
        assert len(order) == len(value.dims), f"{value.dims} in {dims}"
        array = jnp.transpose(value.array, [*range(self.axes), *(self.axes + k for k in order)])
        shape = [array.shape[self.axes + order.index(value.dims.index(d))] if d in value.dims else 1 for d in dims]
        return array.reshape(*array.shape[: self.axes], *shape)

    def full(self, value, dims):
        """The same, repeated along those that it has not."""
        array = self.aligned(value, dims)
        return jnp.broadcast_to(array, (*array.shape[: self.axes], *(self.sizes[dim] for dim in dims)))

    def fit(self, a, b):
        """The dimensions of two values that are combined: one has all of the other."""
        if set(b.dims) <= set(a.dims):
            return a.dims
        assert set(a.dims) <= set(b.dims), f"{a.dims} and {b.dims} do not fit"
        return b.dims

    def union(self, a, b):
        first, second = (b, a) if len(b.dims) > len(a.dims) and set(a.dims) <= set(b.dims) else (a, b)
        return (*first.dims, *(dim for dim in second.dims if dim not in first.dims))

    def two(self, f, a, b, dims):
        return Value(tuple(dims), f(self.aligned(a, dims), self.aligned(b, dims)))

    def over(self, call, value):
        """Axes and names behind `over`."""
        names = call.words.get("over") or list(value.dims)
        assert call.words.get("over") or len(names) == 1, f"{call.name} of {value.dims} over which?"
        return names, tuple(self.axes + value.dims.index(name) for name in names)

    def number(self, x):
        return Value((), jnp.full((1,) * self.axes, float(x)))

    # Expressions

    def value(self, e):
        if isinstance(e, (int, float)):
            return self.number(e)
        if isinstance(e, str):
            return self.name(e)
        if isinstance(e, Call):
            return self.call(e)
        if e[0] == "index":
            return self.index(*e[1:])
        if e[0] == "of":
            made = self.context.others[e[1]][e[2]]
            self.sizes |= {d: n for d, n in zip(made.dims, made.array.shape[self.axes :]) if d not in self.sizes}
            return made
        operator, *sides = e
        sides = [self.value(side) for side in sides]
        if len(sides) == 1:
            return Value(sides[0].dims, ELEMENTS[operator](sides[0].array))
        return self.two(PAIRS[operator], *sides, self.fit(*sides))

    def name(self, name):
        if self.score and name in self.score:
            return self.score[name]
        if name in self.names:
            value = self.names[name]
            if self.score:  # a constant
                assert value.array.shape[:2] == (1, 1), f"{name} in a score needs [i] or [j]"
                return Value(value.dims, value.array[:, :, None])
            return value
        if name in self.numbers:
            return self.number(self.numbers[name])
        facts = {"depth": self.context.depth, "depths": self.context.depths, "pass": self.context.passing}
        if name == "position":
            return Value((), jnp.asarray(self.places, dtype=float)[None])
        return self.number(facts[name])

    @property
    def places(self):
        return np.arange(self.tokens[1]) if self.step is None else np.array([self.step])

    step = None  # the token at which a recurrence is

    def call(self, call):
        name = call.name
        if name in ELEMENTS:
            value = self.value(call.values[0])
            return Value(value.dims, ELEMENTS[name](value.array))
        if name in PAIRS:
            a, b = map(self.value, call.values)
            return self.two(PAIRS[name], a, b, self.fit(a, b))
        return getattr(self, f"of_{name}")(call)

    def of_where(self, call):
        c, a, b = map(self.value, call.values)
        dims = max((c.dims, a.dims, b.dims), key=len)
        dims = self.fit(a, b) if len(self.fit(a, b)) == len(dims) else dims
        c, a, b = (self.aligned(v, dims) for v in (c, a, b))
        return Value(tuple(dims), jnp.where(c != 0, a, b))

    def of_clip(self, call):
        v, low, high = map(self.value, call.values)
        v = self.two(jnp.maximum, v, low, self.fit(v, low))
        return self.two(jnp.minimum, v, high, self.fit(v, high))

    def reduced(self, call, how):
        value = self.value(call.values[0])
        names, axes = self.over(call, value)
        return Value(tuple(d for d in value.dims if d not in names), how(value.array, axis=axes))

    def of_sum(self, call):
        # A dimension over which a product is summed belongs to either side.
        return self.reduced(call, jnp.sum)

    def of_mean(self, call):
        return self.reduced(call, jnp.mean)

    def of_maximum(self, call):
        return self.reduced(call, jnp.max)

    def of_dot(self, call):
        a, b = map(self.value, call.values)
        both = self.two(PAIRS["*"], a, b, self.union(a, b))
        names, axes = self.over(call, both)
        return Value(tuple(d for d in both.dims if d not in names), jnp.sum(both.array, axis=axes))

    def of_outer(self, call):
        a, b = map(self.value, call.values)
        return self.two(PAIRS["*"], a, b, self.union(a, b))

    def of_softmax(self, call):
        value = self.value(call.values[0])
        _, (axis,) = self.over(call, value)
        return Value(value.dims, jax.nn.softmax(value.array, axis=axis))

    def normed(self, call, how):
        value = self.value(call.values[0])
        names, axes = self.over(call, value)
        eps = float(arithmetic(call.named["eps"], self.numbers)) if "eps" in call.named else 1e-6
        result = Value(value.dims, how(value.array, axes, eps))
        if "gain" in call.values:
            gain = self.weight("gain", names, ("constant", 1.0), "own")
            result = self.two(PAIRS["*"], result, gain, result.dims)
        return result

    def of_rms(self, call):
        return self.normed(call, lambda v, axes, eps: v / jnp.sqrt(jnp.mean(v * v, axis=axes, keepdims=True) + eps))

    def of_l2(self, call):
        return self.normed(call, lambda v, axes, eps: v / jnp.sqrt(jnp.sum(v * v, axis=axes, keepdims=True) + eps))

    def of_layer_norm(self, call):
        def how(v, axes, eps):
            v = v - jnp.mean(v, axis=axes, keepdims=True)
            return v / jnp.sqrt(jnp.mean(v * v, axis=axes, keepdims=True) + eps)

        return self.normed(call, how)

    def of_linear(self, call):
        value = self.value(call.values[0])
        out = self.written(call.dims)
        over = call.words.get("over") or list(value.dims)
        weight = self.weight("weight", [*out, *over], self.beginning(call), "matrix", len(over))
        # Every axis has a letter; one of the result that is summed over, too, has two.
        letters = dict(zip(dict.fromkeys([*value.dims, *out, *over]), "cdefghijkl"))
        summed = {dim: letters[dim] for dim in over}
        given = {dim: "mnopqrsu"[k] if dim in over else letters[dim] for k, dim in enumerate(out)}
        stays = [dim for dim in value.dims if dim not in over and dim not in out]
        x = "".join(letters[dim] for dim in value.dims)
        w = "".join(given[dim] for dim in out) + "".join(summed[dim] for dim in over)
        y = "".join(letters[dim] for dim in stays) + "".join(given[dim] for dim in out)
        array = jnp.einsum(f"ab{x},{w}->ab{y}", value.array, weight.array[(0,) * self.axes])
        result = Value((*stays, *out), array)
        if "bias" in call.values:
            bias = self.weight("bias", out, ("constant", 0.0), "own")
            result = self.two(PAIRS["+"], result, bias, result.dims)
        return result

    def of_weight(self, call):
        return self.weight("weight", self.written(call.dims), self.beginning(call), "own")

    def of_embedding(self, call):
        dims = self.written(call.dims)
        self.sizes["vocab of tokens"] = self.context.vocab
        table = self.weight("weight", ["vocab of tokens", *dims], self.beginning(call), "own").array[(0,) * self.axes]
        ids = jnp.zeros(self.tokens, int) if self.context.ids is None else self.context.ids
        return Value(tuple(dims), table[ids])

    def of_places(self, call):
        dim = call.values[0]
        return Value((dim,), jnp.arange(float(self.sizes[dim])).reshape((1,) * self.axes + (-1,)))

    def of_split(self, call):
        value = self.value(call.values[0])
        (name,), _ = self.over(call, value)
        parts = self.written(call.dims)
        dims = tuple(d for own in value.dims for d in (parts if own == name else [own]))
        return Value(dims, value.array.reshape(*value.array.shape[: self.axes], *(self.sizes[d] for d in dims)))

    def of_merge(self, call):
        value = self.value(call.values[0])
        names, _ = self.over(call, value)
        at, (name, size) = value.dims.index(names[0]), call.dims[0]
        assert list(value.dims[at : at + len(names)]) == names
        all_of_them = int(np.prod([self.sizes[d] for d in names]))
        assert size is None or whole(arithmetic(size, self.numbers)) == all_of_them
        assert self.sizes.setdefault(name, all_of_them) == all_of_them
        dims = (*value.dims[:at], name, *value.dims[at + len(names) :])
        return Value(dims, value.array.reshape(*value.array.shape[: self.axes], *(self.sizes[d] for d in dims)))

    def of_join(self, call):
        """Of each value the dimension that the others have not becomes part of the new one."""
        values, (name,) = [self.value(v) for v in call.values], call.words["along"]
        first = values[0]
        shared = [d for d in first.dims if all(d in v.dims for v in values) and d != name]
        parts = []
        for v in values:
            own = [d for d in v.dims if d not in shared]
            assert len(own) == 1, v.dims
            parts.append((v, own[0]))
        at = first.dims.index(parts[0][1])
        dims = tuple(name if k == at else d for k, d in enumerate(first.dims))
        batch = np.broadcast_shapes(*(v.array.shape[: self.axes] for v in values))
        arrays = []
        for v, own in parts:
            order = [own if d == name else d for d in dims]
            array = self.aligned(v, order)
            arrays.append(jnp.broadcast_to(array, (*batch, *array.shape[self.axes :])))
        joined = jnp.concatenate(arrays, axis=self.axes + at)
        assert self.sizes.setdefault(name, joined.shape[self.axes + at]) == joined.shape[self.axes + at]
        return Value(dims, joined)

    def of_slice(self, call):
        value, start = self.value(call.values[0]), int(arithmetic(call.values[1], self.numbers))
        (name,), (axis,) = self.over(call, value)
        (part,) = self.written(call.dims)
        array = jax.lax.slice_in_dim(value.array, start, start + self.sizes[part], axis=axis)
        return Value(tuple(part if d == name else d for d in value.dims), array)

    def of_stop(self, call):
        value = self.value(call.values[0])
        return Value(value.dims, self.context.stop(value.array))

    def of_rope(self, call):
        value = self.value(call.values[0])
        base = arithmetic(call.values[1], self.numbers) if len(call.values) > 1 else 10000
        axis = self.axes + value.dims.index((call.words.get("over") or [value.dims[-1]])[0])
        half = value.array.shape[axis] // 2
        frequencies = float(base) ** (-np.arange(half) / half)
        if call.words.get("at") == ["depth"]:
            angle = self.context.depth * frequencies[None, None]
        else:
            angle = self.places[None, :, None] * frequencies
        shape = [1] * value.array.ndim
        shape[1], shape[axis] = angle.shape[1], half
        cos, sin = jnp.cos(angle).reshape(shape), jnp.sin(angle).reshape(shape)
        a, b = jnp.split(value.array, 2, axis=axis)
        return Value(value.dims, jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=axis))

    # Several tokens

    def each(self, value):
        """Its array with every token."""
        return jnp.broadcast_to(value.array, (*self.tokens, *value.array.shape[2:]))

    def back(self, array, by):
        """The rows so many tokens before, zero before the start."""
        moved = jnp.roll(array, by, axis=1)
        there = (np.arange(array.shape[1]) >= by).reshape(1, -1, *[1] * (array.ndim - 2))
        return jnp.where(there, moved, 0.0)

    def of_shift(self, call):
        value = self.value(call.values[0])
        by = call.named.get("n", call.values[1] if len(call.values) > 1 else 1)
        return Value(value.dims, self.back(self.each(value), int(arithmetic(by, self.numbers))))

    def of_conv(self, call):
        value, width = self.value(call.values[0]), call.values[1]
        name = width if isinstance(width, str) else "a conv's width"
        self.sizes[name] = int(arithmetic(width, self.numbers))
        taps = self.weight("filter", [*value.dims, name], ("filter",), "own").array
        array = self.each(value)
        total = sum(taps[..., m] * self.back(array, m) for m in range(self.sizes[name]))
        if "bias" in call.values:
            total = total + self.weight("bias", value.dims, ("constant", 0.0), "own").array
        return Value(value.dims, total)

    def of_average(self, call):
        value = self.value(call.values[0])
        assert self.score is None and value.array.shape[:2] == self.tokens, "a mean of what is the same for all"
        axes = (0, 1) if "batch" in call.values else 1
        return Value(value.dims, jnp.broadcast_to(jnp.mean(value.array, axis=axes, keepdims=True), value.array.shape))

    def of_running(self, call):
        value = self.value(call.values[0])
        array = self.each(value)
        if "block" not in call.named:
            return Value(value.dims, jnp.cumsum(array, axis=1))
        block = int(arithmetic(call.named["block"], self.numbers))
        parts = [array[:, first : first + block] for first in range(0, array.shape[1], block)]
        return Value(value.dims, jnp.concatenate([jnp.cumsum(part, axis=1) for part in parts], axis=1))

    def recurrence(self, states, body):
        """Statements once a token."""
        outer, before = dict(self.names), {}
        for name, dims, start in states:
            self.label = name
            dims = self.written(dims)
            start = self.value(start)
            before[name] = Value(tuple(dims), self.full(start, dims))
        paths, rows, tokens = dict(self.paths), [], self.tokens
        for t in range(tokens[1]):
            # Weights of the body are the same at every token, and so are their names.
            self.paths = dict(paths)
            at = lambda v: Value(v.dims, v.array[:, t : t + 1] if v.array.shape[1] > 1 else v.array)
            self.names = {name: at(value) for name, value in outer.items()} | before
            self.step = t
            self.execute(body)
            before = {n: Value(tuple(d for d, _ in dims), self.full(self.names[n], [d for d, _ in dims]))
                      for n, dims, _ in states}  # fmt: skip
            made = {name for kind, name, *_ in body if kind == "assign"} | set(before)
            rows.append({name: before.get(name, self.names[name]) for name in made})
        self.step, self.names = None, outer
        for name in rows[0]:
            full = [jnp.broadcast_to(row[name].array, (tokens[0], *row[name].array.shape[1:])) for row in rows]
            self.names[name] = Value(rows[0][name].dims, jnp.concatenate(full, axis=1))

    def of_choose(self, call):
        """Numbers of blocks, increasing, -1 for none; a score is of the key at the end of a block."""
        measures = [v for v in call.values if v in ("relu", "softmax")]
        q, k, written = [v for v in call.values if v not in measures]
        q, k = self.value(q), self.value(k)
        count = int(arithmetic(written, self.numbers))
        block, near, first = (int(arithmetic(call.named.get(n, d), self.numbers)) for n, d in [("block", 1), ("near", 0), ("first", 0)])
        summed, heads = q.dims[-1], q.dims[:-1]
        scale = arithmetic(call.named["scale"], self.numbers) if "scale" in call.named else self.sizes[summed] ** -0.5
        of_keys = [d for d in k.dims if d != summed]
        if not set(of_keys) <= set(heads):
            (group,), (head,) = of_keys, heads
            k = self.repeated(k, group, head, self.sizes[head] // self.sizes[group])
        moved = [self.full(Value(v.dims, self.each(v)), [*heads, summed]) for v in (q, k)]
        queries, keys = (self.context.stop(array) for array in moved)
        t = self.tokens[1]
        ends = keys[:, block - 1 :: block]  # [b, c, heads…, size]
        blocks = -(-t // block)
        s = scale * jnp.sum(queries[:, :, None] * ends[:, None], axis=-1)  # [b, i, c, heads…]
        i, c = np.arange(t)[:, None], np.arange(blocks)[None]
        complete = ((c + 1) * block - 1 <= i)[:, : ends.shape[1]].reshape(1, t, -1, *[1] * len(heads))
        if "softmax" in measures:
            s = jnp.where(complete, s, -1e300)
            s = jnp.where(complete, jnp.exp(s - jnp.max(s, axis=2, keepdims=True, initial=-1e300)), 0.0)
            s = s / jnp.maximum(jnp.sum(s, axis=2, keepdims=True), 1e-300)
        if "relu" in measures:
            s = jax.nn.relu(s)
        weights = self.aligned(self.value(call.named["weights"]), heads)[:, :, None] if "weights" in call.named else 1.0
        s = s * self.context.stop(weights)
        over = call.words.get("over", [])
        lists = [d for d in heads if d not in over]
        s = jnp.sum(s, axis=tuple(3 + heads.index(d) for d in over))
        shape = (1, t, blocks, *[1] * len(lists))
        whole_blocks = complete.reshape(1, t, -1, *[1] * len(lists))
        s = jnp.where(whole_blocks, s, -jnp.inf)
        s = jnp.pad(s, [(0, 0), (0, 0), (0, blocks - s.shape[2]), *[(0, 0)] * len(lists)], constant_values=-jnp.inf)
        own = i // block
        s = jnp.where(((c < first) & (c <= own)).reshape(shape), 1e200, s)
        s = jnp.where(((c > own - near) & (c <= own)).reshape(shape), 1e250, s)
        s = jnp.pad(s, [(0, 0), (0, 0), (0, max(count - blocks, 0)), *[(0, 0)] * len(lists)], constant_values=-jnp.inf)
        order = jnp.argsort(-s, axis=2, stable=True)[:, :, :count]
        number = jnp.where(jnp.take_along_axis(s, order, axis=2) > -jnp.inf, order, 10**6)
        number = jnp.sort(number, axis=2)
        number = jnp.moveaxis(jnp.where(number < 10**6, number, -1), 2, -1)
        name = written if isinstance(written, str) else "choices"
        while self.sizes.setdefault(name, count) != count:
            name += "'"
        chosen = Value((*lists, name), jnp.asarray(number, float))
        chosen.block = block
        chosen.made = (moved, scale, "relu" in measures, weights, heads, over)
        return chosen

    def of_scores(self, call):
        """The scores of the tokens of a choice, -1e20 where it has none: DeepSeek-V3.2, equation 1, at chosen tokens."""
        chosen = self.value(call.values[0])
        (queries, keys), scale, relu, weights, heads, over = chosen.made
        s = scale * jnp.einsum("bi...d,bj...d->bij...", queries, keys)
        s = weights * (jax.nn.relu(s) if relu else s)
        s = jnp.moveaxis(jnp.sum(s, axis=tuple(3 + heads.index(d) for d in over)), 2, -1)
        number = chosen.array.astype(int)
        return Value(chosen.dims, jnp.where(number < 0, -1e20, jnp.take_along_axis(s, jnp.maximum(number, 0), axis=-1)))

    def of_mass(self, call):
        """How much of the weights of an attention each block of a choice has, summed over the heads of a list."""
        p, heads, chosen = self.value(call.values[0]).weights
        *lists, choices = chosen.dims
        of_key = np.arange(p.shape[2]) // chosen.block
        if not set(lists) <= set(heads):
            (group,), (head,) = lists, heads
            p = p.reshape(*p.shape[:3], self.sizes[group], -1).sum(-1)
            heads = (group,)
        p = jnp.sum(p, axis=tuple(3 + heads.index(d) for d in heads if d not in lists))
        kept = [d for d in heads if d in lists]
        number = self.aligned(chosen, [*kept, choices])
        own = of_key.reshape(1, 1, -1, *[1] * len(kept), 1) == number[:, :, None]
        mass = jnp.sum(jnp.where(own, p[..., None], 0.0), axis=2)
        return Value((*kept, choices), self.context.stop(mass))

    def of_attend(self, call):
        q, k, v = (self.value(each) for each in call.values[:3])
        summed, heads = q.dims[-1], q.dims[:-1]
        of_keys = [d for d in k.dims if d != summed]
        (own,) = [d for d in v.dims if d not in of_keys]
        if not set(of_keys) <= set(heads):
            # Groups: heads of queries one after the other read one of the keys.
            (group,), (head,) = of_keys, heads
            times = self.sizes[head] // self.sizes[group]
            k, v = (self.repeated(each, group, head, times) for each in (k, v))
        q, k, v = (Value(each.dims, self.each(each)) for each in (q, k, v))
        scale = arithmetic(call.named["scale"], self.numbers) if "scale" in call.named else self.sizes[summed] ** -0.5
        queries, keys = self.full(q, [*heads, summed]), self.full(k, [*heads, summed])
        values = self.full(v, [*heads, own])
        s = scale * jnp.sum(queries[:, :, None] * keys[:, None], axis=-1)  # [b, i, j, heads…]
        t = self.tokens[1]
        i, j = np.arange(t)[:, None], np.arange(t)[None]
        visible = (j <= i) & (i - j < (arithmetic(call.named["window"], self.numbers) if "window" in call.named else t))
        if "every" in call.named:
            visible = visible & ((j + 1) % int(arithmetic(call.named["every"], self.numbers)) == 0)
        visible = visible.reshape(1, t, t, *[1] * len(heads))
        if "among" in call.named:
            chosen = among = self.value(call.named["among"])
            *lists, choices = chosen.dims
            if not set(lists) <= set(heads):
                (group,), (head,) = lists, heads
                times, block = self.sizes[head] // self.sizes[group], chosen.block
                chosen = self.repeated(chosen, group, head, times)
                chosen.block = block
            number = self.aligned(chosen, [*heads, choices])[:, :, None]
            of_key = (np.arange(t) // chosen.block).reshape(1, 1, t, *[1] * len(heads), 1)
            visible = visible & jnp.any(number == of_key, axis=-1)
        sink = self.weight("weight", heads, ("constant", 0.0), "own").array[:, :, None] if "sink" in call.values else None
        words = {"s": Value(heads, s), "i": Value((), jnp.asarray(i, float)[None]), "j": Value((), jnp.asarray(j, float)[None])}
        if len(heads) == 1:
            words["head"] = Value(heads, jnp.arange(float(self.sizes[heads[0]])).reshape(1, 1, 1, -1))
        self.score, self.axes = words, 3
        if "score" in call.named:
            s = jnp.broadcast_to(self.aligned(self.value(call.named["score"]), heads), s.shape)
        if "mask" in call.named:
            visible = visible & (self.aligned(self.value(call.named["mask"]), heads) != 0)
        self.score, self.axes = None, 2
        visible = jnp.broadcast_to(visible, s.shape)
        sees = jnp.any(visible, axis=2, keepdims=True)
        s = jnp.where(visible | ~sees, s, -jnp.inf)
        if sink is not None:
            s = jnp.concatenate([s, jnp.broadcast_to(sink, (*s.shape[:2], 1, *s.shape[3:]))], axis=2)
        p = jax.nn.softmax(s, axis=2)[:, :, :t] * sees  # a row that sees nothing is zero
        result = Value((*heads, own), jnp.sum(p[..., None] * values[:, None], axis=2))
        if "among" in call.named:
            # Without the sink, if there is one.
            result.weights = (p / jnp.maximum(jnp.sum(p, axis=2, keepdims=True), 1e-300), heads, among)
        return result

    def repeated(self, value, group, head, times):
        axis = self.axes + value.dims.index(group)
        return Value(tuple(head if d == group else d for d in value.dims), jnp.repeat(value.array, times, axis=axis))

    def index(self, name, places):
        """`c[i]`, `c[j]`, `T[head, i - j]` in a score."""
        value = self.names[name]
        if places in (["i"], ["j"]) and value.array.shape[1] > 1:
            return Value(value.dims, value.array[:, :, None] if places == ["i"] else value.array[:, None])
        table = value.array[0, 0]
        places = [self.value(place) for place in places]
        dims = max((place.dims for place in places), key=len)
        at = [self.aligned(place, dims).astype(int) for place in places]
        return Value(dims, table[tuple(at)])

    # Several applications

    def of_earlier(self, call):
        (name,) = call.values
        if name in self.context.earlier:
            return self.context.earlier[name]
        return self.number(0.0)  # zero at the first

    def of_depth_attend(self, call):
        q, k, v = (self.value(each) for each in call.values[:3])
        summed, heads = q.dims[-1], q.dims[:-1]
        of_keys = [d for d in k.dims if d != summed]
        (own,) = [d for d in v.dims if d not in of_keys]
        if not set(of_keys) <= set(heads):
            (group,), (head,) = of_keys, heads
            times = self.sizes[head] // self.sizes[group]
            k, v = (self.repeated(each, group, head, times) for each in (k, v))
        scale = arithmetic(call.named["scale"], self.numbers) if "scale" in call.named else self.sizes[summed] ** -0.5
        self.depth_attends += 1
        cache = self.context.along_depth.setdefault(self.depth_attends, [])
        cache.append((self.full(k, [*heads, summed]), self.full(v, [*heads, own])))
        keys, values = (jnp.stack(each, axis=2) for each in zip(*cache))  # [b, t, applications, heads…, size]
        s = scale * jnp.sum(self.full(q, [*heads, summed])[:, :, None] * keys, axis=-1)
        p = jax.nn.softmax(s, axis=2)
        return Value((*heads, own), jnp.sum(p[..., None] * values, axis=2))
